-- Upkeep: what operators and workers need beside the messages themselves. Only additions: workers
-- and publishers of earlier versions go on as before.

-- When letters of a source may next be redriven by rule: the rate limit of all its workers together.
CREATE TABLE postroom_redrive_pace (
    source  TEXT NOT NULL,
    next_at INTEGER NOT NULL,
    PRIMARY KEY (source)
);
-- Every consumer that has received here, with its broker and topics: operators see one that is not
-- alive, and for how long its broker may redeliver messages.
CREATE TABLE postroom_consumer (
    name    TEXT PRIMARY KEY,
    broker  TEXT NOT NULL,
    topics  TEXT NOT NULL,
    seen_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER))
) WITHOUT ROWID;

-- The length of each lease beside its end: one that ends later than its owner could have written it
-- was written before the database's clock went back.
ALTER TABLE postroom_lane ADD COLUMN lease_us INTEGER;
ALTER TABLE postroom_job ADD COLUMN lease_us INTEGER;
ALTER TABLE postroom_idempotency_key ADD COLUMN lease_us INTEGER;
ALTER TABLE postroom_inbox_held ADD COLUMN lease_us INTEGER;

UPDATE postroom_meta SET value = '6' WHERE name = 'schema_version';
