-- Lanes first, as a settle locks them.
ALTER TABLE postroom.lane DROP COLUMN lease_us;
ALTER TABLE postroom.job DROP COLUMN lease_us;
ALTER TABLE postroom.idempotency_key DROP COLUMN lease_us;
ALTER TABLE postroom.inbox_held DROP COLUMN lease_us;
DROP TABLE postroom.redrive_pace;
DROP TABLE postroom.consumer;
-- The archive has its primary key again: of several deliveries of one id on a day the first stays.
DROP INDEX postroom.archive_id;
DROP INDEX postroom.archive_position;
DELETE FROM postroom.archive a USING postroom.archive b
 WHERE a.id = b.id AND a.day = b.day AND (a.position, a.ctid) > (b.position, b.ctid);
ALTER TABLE postroom.archive ADD CONSTRAINT archive_pkey PRIMARY KEY (id, day);
CREATE OR REPLACE FUNCTION postroom.make_archive_days(days_ahead integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' SET timezone = 'UTC' AS $$
DECLARE
    first date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    made integer := 0;
    part text;
BEGIN
    FOR n IN 0..least(greatest(days_ahead, 0), 60) LOOP
        part := 'archive_' || to_char(first + n, 'YYYYMMDD');
        CONTINUE WHEN to_regclass('postroom.' || part) IS NOT NULL;
        BEGIN
            EXECUTE format(
                'CREATE TABLE postroom.%I PARTITION OF postroom.archive FOR VALUES FROM (%L) TO (%L)',
                part, first + n, first + n + 1);
            made := made + 1;
        EXCEPTION WHEN duplicate_table OR check_violation OR lock_not_available THEN
            NULL;
        END;
    END LOOP;
    RETURN made;
END $$;
UPDATE postroom.meta SET value = '5' WHERE name = 'schema_version';
