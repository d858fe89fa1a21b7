-- Upkeep: what operators and workers need beside the messages themselves, and cheaper indexes of the
-- archive. Workers and publishers of earlier versions go on as before.

-- When letters of a source may next be redriven by rule: the rate limit of all its workers together.
CREATE TABLE postroom.redrive_pace (
    source  text NOT NULL,
    next_at timestamptz NOT NULL,
    PRIMARY KEY (source)
);

-- Every consumer that has received here, with its broker and topics: operators see one that is not
-- alive, and for how long its broker may redeliver messages.
CREATE TABLE postroom.consumer (
    name    text PRIMARY KEY,
    broker  text NOT NULL,
    topics  text NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The archive loses its primary key, which cost a settle a quarter of its time. Messages are found by
-- Bloom filters of their ids for each range of 64 blocks, and by the positions of a range (BRIN):
-- they cost an insert nothing, hold ids of every kind, and autovacuum writes them for new blocks, so
-- it looks often. Without a key, logical replication needs another identity.
-- Days that are over come first: nothing is written there. Relays wait while today's is read, about
-- a second for each GB, and publishers do not. No row is written. The first lock keeps relays from
-- adding a day until the migration ends. Lanes are locked before the day that settles write: a settle
-- locks its lane and then writes the archive, so in the other order the two would wait for each
-- other, and the relay would send its batch again.
LOCK TABLE ONLY postroom.archive IN SHARE UPDATE EXCLUSIVE MODE;
DO $$
DECLARE
    today text := 'archive_' || to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYYMMDD');
    days text[] := ARRAY(
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
         WHERE i.inhparent = 'postroom.archive'::regclass ORDER BY c.relname);
    ids text := 'USING brin (id uuid_bloom_ops(n_distinct_per_range = 1500,'
                ' false_positive_rate = 0.001)) WITH (pages_per_range = 64)';
    positions text := 'USING brin (position int8_minmax_multi_ops) WITH (pages_per_range = 64)';
    part text;
BEGIN
    FOREACH part IN ARRAY days LOOP
        IF part >= today THEN  -- the overflow too
            LOCK TABLE postroom.lane IN ACCESS EXCLUSIVE MODE;
        END IF;
        EXECUTE format('ALTER TABLE postroom.%I SET (autovacuum_vacuum_insert_scale_factor = 0,'
                       ' autovacuum_vacuum_insert_threshold = 50000)', part);
        EXECUTE format('CREATE INDEX %I ON postroom.%I %s', part || '_id', part, ids);
        EXECUTE format('CREATE INDEX %I ON postroom.%I %s', part || '_position', part, positions);
    END LOOP;
END $$;
CREATE INDEX archive_id ON ONLY postroom.archive
    USING brin (id uuid_bloom_ops(n_distinct_per_range = 1500, false_positive_rate = 0.001))
    WITH (pages_per_range = 64);
CREATE INDEX archive_position ON ONLY postroom.archive
    USING brin (position int8_minmax_multi_ops) WITH (pages_per_range = 64);
DO $$
DECLARE
    part text;
BEGIN
    FOR part IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
         WHERE i.inhparent = 'postroom.archive'::regclass
    LOOP
        EXECUTE format('ALTER INDEX postroom.archive_id ATTACH PARTITION postroom.%I', part || '_id');
        EXECUTE format('ALTER INDEX postroom.archive_position ATTACH PARTITION postroom.%I',
                       part || '_position');
        EXECUTE format('ALTER TABLE postroom.%I REPLICA IDENTITY FULL', part);
    END LOOP;
END $$;
ALTER TABLE postroom.archive DROP CONSTRAINT archive_pkey;
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
                'CREATE TABLE postroom.%I PARTITION OF postroom.archive FOR VALUES FROM (%L) TO (%L)'
                ' WITH (autovacuum_vacuum_insert_scale_factor = 0,'
                ' autovacuum_vacuum_insert_threshold = 50000)',
                part, first + n, first + n + 1);
            EXECUTE format('ALTER TABLE postroom.%I REPLICA IDENTITY FULL', part);
            made := made + 1;
        EXCEPTION WHEN duplicate_table OR check_violation OR lock_not_available THEN
            NULL;
        END;
    END LOOP;
    RETURN made;
END $$;

-- The length of each lease beside its end: one that ends later than its owner could have written it
-- was written before the database's clock went back.
ALTER TABLE postroom.lane ADD COLUMN lease_us bigint;
ALTER TABLE postroom.job ADD COLUMN lease_us bigint;
ALTER TABLE postroom.idempotency_key ADD COLUMN lease_us bigint;
ALTER TABLE postroom.inbox_held ADD COLUMN lease_us bigint;

UPDATE postroom.meta SET value = '6' WHERE name = 'schema_version';
