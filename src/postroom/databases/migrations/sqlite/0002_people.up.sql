-- The inbox, the operators' jobs, and what a worker says of itself. Only new tables and a new column:
-- workers and publishers of version 1 go on as before, and nothing that exists is rewritten.

-- What a consumer has handled: written in the transaction of its effect.
CREATE TABLE postroom_inbox (
    consumer   TEXT NOT NULL,
    message_id TEXT NOT NULL,
    digest     TEXT,
    handled_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)),
    PRIMARY KEY (consumer, message_id)
) WITHOUT ROWID;
CREATE INDEX postroom_inbox_age ON postroom_inbox (handled_at);

-- A redrive or a replay of many messages: what was asked for, how far it has come, who works on it.
CREATE TABLE postroom_job (
    id           TEXT PRIMARY KEY,
    kind         TEXT NOT NULL CHECK (kind IN ('redrive', 'replay')),
    state        TEXT NOT NULL CHECK (state IN ('running', 'stopped', 'done')),
    wish         TEXT NOT NULL,
    reached      TEXT,
    total        INTEGER NOT NULL,
    queued       INTEGER NOT NULL DEFAULT 0,
    note         TEXT,
    who          TEXT NOT NULL,
    why          TEXT,
    owner        TEXT,
    epoch        INTEGER NOT NULL DEFAULT 0,
    lease_until  INTEGER,
    created_at   INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)),
    updated_at   INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER))
) WITHOUT ROWID;

-- The messages a job has queued, so that it can see what became of them.
CREATE TABLE postroom_job_item (
    job      TEXT NOT NULL,
    id       TEXT NOT NULL,
    position INTEGER NOT NULL,
    PRIMARY KEY (job, position, id)
) WITHOUT ROWID;

ALTER TABLE postroom_worker ADD COLUMN report TEXT;

INSERT INTO postroom_meta (name, value) VALUES ('oldest_code', '1')
ON CONFLICT (name) DO UPDATE SET value = excluded.value;
UPDATE postroom_meta SET value = '2' WHERE name = 'schema_version';
