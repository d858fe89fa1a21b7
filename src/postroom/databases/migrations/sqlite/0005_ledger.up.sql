-- The ledger: the permanent register of requests sent through the outbox. Only a new table: workers
-- and publishers of earlier versions go on as before. Nothing in it is ever pruned.

-- A request and what became of it. `id` is that of its message, and the name under which whoever
-- receives it knows it. `finished_at` is empty while a relay still has it to send.
CREATE TABLE postroom_ledger (
    id          TEXT NOT NULL,
    scope       TEXT NOT NULL,
    key         TEXT NOT NULL,
    digest      TEXT NOT NULL,
    state       TEXT NOT NULL CHECK (state IN ('accepted', 'succeeded', 'failed', 'unknown')),
    request     BLOB NOT NULL,
    answer      TEXT,
    attempts    INTEGER NOT NULL DEFAULT 0,
    error_code  TEXT,
    error       TEXT,
    adapter     TEXT,
    note        TEXT,
    accepted_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)),
    updated_at  INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)),
    finished_at INTEGER,
    PRIMARY KEY (id)
);
CREATE UNIQUE INDEX postroom_ledger_key ON postroom_ledger (key, scope);
CREATE INDEX postroom_ledger_open ON postroom_ledger (state, id) WHERE state <> 'succeeded';

UPDATE postroom_meta SET value = '5' WHERE name = 'schema_version';
