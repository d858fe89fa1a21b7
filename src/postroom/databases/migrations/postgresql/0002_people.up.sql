-- The inbox, the operators' jobs, and what a worker says of itself. Only new tables and a new column:
-- workers and publishers of version 1 go on as before, and nothing that exists is rewritten.

-- What a consumer has handled: written in the transaction of its effect.
CREATE TABLE postroom.inbox (
    consumer   text NOT NULL,
    message_id text NOT NULL,
    digest     text,
    handled_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, message_id)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05);
CREATE INDEX inbox_age ON postroom.inbox (handled_at);

-- A redrive or a replay of many messages: what was asked for, how far it has come, who works on it.
CREATE TABLE postroom.job (
    id           uuid PRIMARY KEY,
    kind         text NOT NULL CONSTRAINT kind_known CHECK (kind IN ('redrive', 'replay')),
    state        text NOT NULL
        CONSTRAINT state_known CHECK (state IN ('running', 'stopped', 'done')),
    wish         text NOT NULL,
    reached      text,
    total        bigint NOT NULL,
    queued       bigint NOT NULL DEFAULT 0,
    note         text,
    who          text NOT NULL,
    why          text,
    owner        text,
    epoch        bigint NOT NULL DEFAULT 0,
    lease_until  timestamptz,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The messages a job has queued, so that it can see what became of them.
CREATE TABLE postroom.job_item (
    job      uuid NOT NULL,
    id       uuid NOT NULL,
    position bigint NOT NULL,
    PRIMARY KEY (job, position, id)
);

ALTER TABLE postroom.worker ADD COLUMN report text;

INSERT INTO postroom.meta (name, value) VALUES ('oldest_code', '1')
ON CONFLICT (name) DO UPDATE SET value = excluded.value;
UPDATE postroom.meta SET value = '2' WHERE name = 'schema_version';
