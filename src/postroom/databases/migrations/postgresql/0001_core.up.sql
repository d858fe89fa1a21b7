-- The outbox and its side tables. Everything lives in a schema of its own, so that a migration tool
-- which compares the application's schema with its models leaves it alone.
CREATE SCHEMA IF NOT EXISTS postroom;

CREATE TABLE postroom.meta (
    name  text PRIMARY KEY,
    value text NOT NULL
);

-- Hot: rows are inserted by publishers, read and deleted by the relay that owns their lane, and
-- never updated. The primary key is the pick-up index; another index would only slow both sides.
CREATE TABLE postroom.outbox (
    lane           smallint NOT NULL CONSTRAINT lane_exists CHECK (lane >= 0 AND lane < 16),
    position       bigint GENERATED ALWAYS AS IDENTITY (CACHE 1),
    id             uuid NOT NULL,
    topic          text NOT NULL,
    key            text,
    type           text NOT NULL,
    aggregate_type text,
    aggregate_id   text,
    content_type   text NOT NULL,
    headers        text,
    payload        bytea NOT NULL,
    size           integer NOT NULL,
    redrives       integer NOT NULL DEFAULT 0,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at     timestamptz,
    PRIMARY KEY (lane, position)
) WITH (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0
);

-- Not due yet: has no place in its key's order until the relay moves it into the outbox.
CREATE TABLE postroom.delayed (
    lane           smallint NOT NULL CONSTRAINT lane_exists CHECK (lane >= 0 AND lane < 16),
    deliver_at     timestamptz NOT NULL,
    id             uuid NOT NULL,
    topic          text NOT NULL,
    key            text,
    type           text NOT NULL,
    aggregate_type text,
    aggregate_id   text,
    content_type   text NOT NULL,
    headers        text,
    payload        bytea NOT NULL,
    size           integer NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at     timestamptz,
    PRIMARY KEY (lane, deliver_at, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);

-- Waiting: a failed message in its back-off and whatever of its key must not pass it. Only the
-- head of a key has next_attempt_at; a blocked head is a dead letter that holds its key.
CREATE TABLE postroom.held (
    lane            smallint NOT NULL CONSTRAINT lane_exists CHECK (lane >= 0 AND lane < 16),
    position        bigint NOT NULL,
    id              uuid NOT NULL,
    topic           text NOT NULL,
    key             text,
    type            text NOT NULL,
    aggregate_type  text,
    aggregate_id    text,
    content_type    text NOT NULL,
    headers         text,
    payload         bytea NOT NULL,
    size            integer NOT NULL,
    redrives        integer NOT NULL DEFAULT 0,
    created_at      timestamptz NOT NULL,
    expires_at      timestamptz,
    attempts        integer NOT NULL DEFAULT 0,
    history         text,
    error_code      text,
    error           text,
    next_attempt_at timestamptz,
    blocked         boolean NOT NULL DEFAULT false,
    PRIMARY KEY (lane, position)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX held_key ON postroom.held (lane, topic, key, position);
CREATE INDEX held_due ON postroom.held (lane, next_attempt_at) WHERE next_attempt_at IS NOT NULL;

CREATE TABLE postroom.dedup (
    dedup_key  text PRIMARY KEY,
    message_id uuid NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX dedup_age ON postroom.dedup (created_at);

CREATE TABLE postroom.lane (
    lane        smallint PRIMARY KEY CONSTRAINT lane_exists CHECK (lane >= 0 AND lane < 16),
    owner       text,
    epoch       bigint NOT NULL DEFAULT 0,
    lease_until timestamptz,
    paused      boolean NOT NULL DEFAULT false
) WITH (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
INSERT INTO postroom.lane (lane) SELECT generate_series(0, 15);

-- What a relay is sending right now: written before the send, deleted when it is settled. A row
-- left behind by a dead relay makes its messages suspects.
CREATE TABLE postroom.lane_batch (
    lane        smallint NOT NULL,
    incarnation text NOT NULL,
    batch       bigint NOT NULL,
    lo          bigint NOT NULL,
    hi          bigint NOT NULL,
    messages    integer NOT NULL,
    alone       boolean NOT NULL,
    held        boolean NOT NULL DEFAULT false,
    PRIMARY KEY (lane, incarnation, batch)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE TABLE postroom.archive (
    day            date NOT NULL,
    id             uuid NOT NULL,
    lane           smallint NOT NULL,
    position       bigint NOT NULL,
    topic          text NOT NULL,
    key            text,
    type           text NOT NULL,
    aggregate_type text,
    aggregate_id   text,
    content_type   text NOT NULL,
    headers        text,
    payload        bytea NOT NULL,
    size           integer NOT NULL,
    redrives       integer NOT NULL,
    attempts       integer NOT NULL,
    created_at     timestamptz NOT NULL,
    delivered_at   timestamptz NOT NULL,
    PRIMARY KEY (id, day)
) PARTITION BY RANGE (day);
-- Catches what has no partition of its own day, so that a settle never fails for want of one.
CREATE TABLE postroom.archive_overflow PARTITION OF postroom.archive DEFAULT;

CREATE TABLE postroom.dead_letter (
    source         text NOT NULL,
    id             uuid NOT NULL,
    lane           smallint NOT NULL,
    position       bigint NOT NULL,
    topic          text NOT NULL,
    key            text,
    type           text NOT NULL,
    aggregate_type text,
    aggregate_id   text,
    content_type   text NOT NULL,
    headers        text,
    payload        bytea NOT NULL,
    size           integer NOT NULL,
    created_at     timestamptz NOT NULL,
    expires_at     timestamptz,
    state          text NOT NULL
        CONSTRAINT state_known CHECK (state IN ('dead', 'queued', 'resolved', 'discarded')),
    holds_key      boolean NOT NULL,
    error_code     text NOT NULL,
    error          text NOT NULL,
    attempts       integer NOT NULL,
    history        text NOT NULL,
    redrives       integer NOT NULL DEFAULT 0,
    died_at        timestamptz NOT NULL,
    retried_at     timestamptz,
    ended_at       timestamptz,
    note           text,
    PRIMARY KEY (source, id, position)
);
CREATE INDEX dead_letter_state ON postroom.dead_letter (state, died_at);

CREATE TABLE postroom.worker (
    incarnation text PRIMARY KEY,
    kind        text NOT NULL,
    name        text NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at     timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

CREATE TABLE postroom.audit (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    who     text NOT NULL,
    what    text NOT NULL,
    subject text NOT NULL,
    why     text
);

-- Partitions belong to the owner of the schema; a relay may only ask for them, through these.
CREATE FUNCTION postroom.make_archive_days(days_ahead integer) RETURNS integer
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

-- One at a time and without patience: whoever settles waits behind the lock this needs.
CREATE FUNCTION postroom.drop_archive_days(keep_seconds bigint) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '200ms' SET timezone = 'UTC' AS $$
DECLARE
    oldest date := ((clock_timestamp() - make_interval(secs => keep_seconds)) AT TIME ZONE 'UTC')::date;
    part record;
    dropped integer := 0;
BEGIN
    FOR part IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
         WHERE i.inhparent = 'postroom.archive'::regclass AND c.relname ~ '^archive_\d{8}$'
           AND to_date(right(c.relname, 8), 'YYYYMMDD') < oldest
         ORDER BY c.relname LIMIT 1
    LOOP
        BEGIN
            EXECUTE format('DROP TABLE postroom.%I', part.relname);
            dropped := dropped + 1;
        EXCEPTION WHEN lock_not_available OR undefined_table THEN
            NULL;
        END;
    END LOOP;
    RETURN dropped;
END $$;

REVOKE ALL ON FUNCTION postroom.make_archive_days(integer) FROM PUBLIC;
REVOKE ALL ON FUNCTION postroom.drop_archive_days(bigint) FROM PUBLIC;
SELECT postroom.make_archive_days(7);

INSERT INTO postroom.meta (name, value) VALUES ('schema_version', '1');
