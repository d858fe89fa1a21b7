-- The ledger: the permanent register of requests sent through the outbox. Only a new table: workers
-- and publishers of earlier versions go on as before. Nothing in it is ever pruned.

-- A request and what became of it. `id` is that of its message, and the name under which whoever
-- receives it knows it. `finished_at` is empty while a relay still has it to send.
CREATE TABLE IF NOT EXISTS postroom_ledger (
    id          CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    scope       VARCHAR(255) NOT NULL,
    `key`       VARCHAR(255) NOT NULL,
    digest      CHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    state       VARCHAR(20) NOT NULL CHECK (state IN ('accepted', 'succeeded', 'failed', 'unknown')),
    request     LONGBLOB NOT NULL,
    answer      LONGTEXT,
    attempts    INT NOT NULL DEFAULT 0,
    error_code  VARCHAR(255),
    error       LONGTEXT,
    adapter     TEXT,
    note        LONGTEXT,
    accepted_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    updated_at  DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    finished_at DATETIME(6),
    PRIMARY KEY (id),
    UNIQUE KEY ledger_key (`key`, scope),
    KEY ledger_open (state, id)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

UPDATE postroom_meta SET value = '5' WHERE name = 'schema_version';
