-- Upkeep: what operators and workers need beside the messages themselves. Only additions: workers
-- and publishers of earlier versions go on as before.

-- When letters of a source may next be redriven by rule: the rate limit of all its workers together.
CREATE TABLE IF NOT EXISTS postroom_redrive_pace (
    source  VARCHAR(255) NOT NULL,
    next_at DATETIME(6) NOT NULL,
    PRIMARY KEY (source)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- Every consumer that has received here, with its broker and topics: operators see one that is not
-- alive, and for how long its broker may redeliver messages.
CREATE TABLE IF NOT EXISTS postroom_consumer (
    name    VARCHAR(100) NOT NULL PRIMARY KEY,
    broker  LONGTEXT NOT NULL,
    topics  LONGTEXT NOT NULL,
    seen_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6))
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- The length of each lease beside its end: one that ends later than its owner could have written it
-- was written before the database's clock went back.
ALTER TABLE postroom_lane ADD COLUMN IF NOT EXISTS lease_us BIGINT;
ALTER TABLE postroom_job ADD COLUMN IF NOT EXISTS lease_us BIGINT;
ALTER TABLE postroom_idempotency_key ADD COLUMN IF NOT EXISTS lease_us BIGINT;
ALTER TABLE postroom_inbox_held ADD COLUMN IF NOT EXISTS lease_us BIGINT;

UPDATE postroom_meta SET value = '6' WHERE name = 'schema_version';
