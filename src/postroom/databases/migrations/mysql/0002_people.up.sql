-- The inbox, the operators' jobs, and what a worker says of itself. Only new tables and a new column:
-- workers and publishers of version 1 go on as before, and nothing that exists is rewritten.

-- What a consumer has handled: written in the transaction of its effect.
CREATE TABLE IF NOT EXISTS postroom_inbox (
    consumer   VARCHAR(255) NOT NULL,
    message_id VARCHAR(255) NOT NULL,
    digest     CHAR(64) CHARACTER SET ascii COLLATE ascii_bin,
    handled_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (consumer, message_id),
    KEY inbox_age (handled_at)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- A redrive or a replay of many messages: what was asked for, how far it has come, who works on it.
CREATE TABLE IF NOT EXISTS postroom_job (
    id           CHAR(36) CHARACTER SET ascii COLLATE ascii_bin PRIMARY KEY,
    kind         VARCHAR(16) NOT NULL CHECK (kind IN ('redrive', 'replay')),
    state        VARCHAR(16) NOT NULL CHECK (state IN ('running', 'stopped', 'done')),
    wish         LONGTEXT NOT NULL,
    reached      LONGTEXT,
    total        BIGINT NOT NULL,
    queued       BIGINT NOT NULL DEFAULT 0,
    note         LONGTEXT,
    who          VARCHAR(255) NOT NULL,
    why          LONGTEXT,
    owner        VARCHAR(64),
    epoch        BIGINT NOT NULL DEFAULT 0,
    lease_until  DATETIME(6),
    created_at   DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    updated_at   DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6))
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- The messages a job has queued, so that it can see what became of them.
CREATE TABLE IF NOT EXISTS postroom_job_item (
    job      CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    id       CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    position BIGINT NOT NULL,
    PRIMARY KEY (job, position, id)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

ALTER TABLE postroom_worker ADD COLUMN IF NOT EXISTS report LONGTEXT;

INSERT INTO postroom_meta (name, value) VALUES ('oldest_code', '1')
ON DUPLICATE KEY UPDATE value = VALUES(value);
UPDATE postroom_meta SET value = '2' WHERE name = 'schema_version';
