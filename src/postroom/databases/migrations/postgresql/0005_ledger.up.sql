-- The ledger: the permanent register of requests sent through the outbox. Only a new table: workers
-- and publishers of earlier versions go on as before. Nothing in it is ever pruned.

-- A request and what became of it. `id` is that of its message, and the name under which whoever
-- receives it knows it. `finished_at` is empty while a relay still has it to send.
CREATE TABLE postroom.ledger (
    id          uuid PRIMARY KEY,
    scope       text NOT NULL,
    key         text NOT NULL,
    digest      text NOT NULL,
    state       text NOT NULL CONSTRAINT ledger_state
                CHECK (state IN ('accepted', 'succeeded', 'failed', 'unknown')),
    request     bytea NOT NULL,
    answer      text,
    attempts    integer NOT NULL DEFAULT 0,
    error_code  text,
    error       text,
    adapter     text,
    note        text,
    accepted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz
) WITH (fillfactor = 80);
CREATE UNIQUE INDEX ledger_key ON postroom.ledger (key, scope);
CREATE INDEX ledger_open ON postroom.ledger (state, id) WHERE state <> 'succeeded';

UPDATE postroom.meta SET value = '5' WHERE name = 'schema_version';
