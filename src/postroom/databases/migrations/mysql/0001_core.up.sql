-- The outbox and its side tables. Times are UTC. Names carry a prefix, since a MariaDB database is
-- its own schema. Collation is binary and does not pad: keys that differ are different.
-- DDL does not roll back here, so every statement may be run again: a half-done install is completed.
CREATE TABLE IF NOT EXISTS postroom_meta (
    name  VARCHAR(64) PRIMARY KEY,
    value LONGTEXT NOT NULL
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- Hot: rows are inserted by publishers, read and deleted by the relay that owns their lane, and
-- never updated. AUTO_INCREMENT wants an index that begins with its column.
CREATE TABLE IF NOT EXISTS postroom_outbox (
    lane           SMALLINT NOT NULL CHECK (lane >= 0 AND lane < 16),
    position       BIGINT NOT NULL AUTO_INCREMENT,
    id             CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    topic          VARCHAR(255) NOT NULL,
    `key`          VARCHAR(255),
    type           VARCHAR(255) NOT NULL,
    aggregate_type VARCHAR(255),
    aggregate_id   VARCHAR(255),
    content_type   VARCHAR(255) NOT NULL,
    headers        LONGTEXT,
    payload        LONGBLOB NOT NULL,
    size           INT NOT NULL,
    redrives       INT NOT NULL DEFAULT 0,
    created_at     DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    expires_at     DATETIME(6),
    PRIMARY KEY (lane, position),
    UNIQUE KEY outbox_position (position)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- Not due yet: has no place in its key's order until the relay moves it into the outbox.
CREATE TABLE IF NOT EXISTS postroom_delayed (
    lane           SMALLINT NOT NULL CHECK (lane >= 0 AND lane < 16),
    deliver_at     DATETIME(6) NOT NULL,
    id             CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    topic          VARCHAR(255) NOT NULL,
    `key`          VARCHAR(255),
    type           VARCHAR(255) NOT NULL,
    aggregate_type VARCHAR(255),
    aggregate_id   VARCHAR(255),
    content_type   VARCHAR(255) NOT NULL,
    headers        LONGTEXT,
    payload        LONGBLOB NOT NULL,
    size           INT NOT NULL,
    created_at     DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    expires_at     DATETIME(6),
    PRIMARY KEY (lane, deliver_at, id)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- Waiting: a failed message in its back-off and whatever of its key must not pass it. Only the
-- head of a key has next_attempt_at; a blocked head is a dead letter that holds its key.
CREATE TABLE IF NOT EXISTS postroom_held (
    lane           SMALLINT NOT NULL CHECK (lane >= 0 AND lane < 16),
    position       BIGINT NOT NULL,
    id             CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    topic          VARCHAR(255) NOT NULL,
    `key`          VARCHAR(255),
    type           VARCHAR(255) NOT NULL,
    aggregate_type VARCHAR(255),
    aggregate_id   VARCHAR(255),
    content_type   VARCHAR(255) NOT NULL,
    headers        LONGTEXT,
    payload        LONGBLOB NOT NULL,
    size           INT NOT NULL,
    redrives       INT NOT NULL DEFAULT 0,
    created_at     DATETIME(6) NOT NULL,
    expires_at     DATETIME(6),
    attempts       INT NOT NULL DEFAULT 0,
    history        LONGTEXT,
    error_code     VARCHAR(255),
    error          LONGTEXT,
    next_attempt_at DATETIME(6),
    blocked        BOOLEAN NOT NULL DEFAULT FALSE,
    PRIMARY KEY (lane, position),
    KEY held_key (lane, topic, `key`, position),
    KEY held_due (lane, next_attempt_at)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS postroom_dedup (
    dedup_key  VARCHAR(255) PRIMARY KEY,
    message_id CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    KEY dedup_age (created_at)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- One row for each key that was published with serialize_key: the publisher locks it.
CREATE TABLE IF NOT EXISTS postroom_key_lock (
    topic VARCHAR(255) NOT NULL,
    `key` VARCHAR(255) NOT NULL,
    PRIMARY KEY (topic, `key`)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS postroom_lane (
    lane        SMALLINT PRIMARY KEY CHECK (lane >= 0 AND lane < 16),
    owner       VARCHAR(64),
    epoch       BIGINT NOT NULL DEFAULT 0,
    lease_until DATETIME(6),
    paused      BOOLEAN NOT NULL DEFAULT FALSE
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;
INSERT INTO postroom_lane (lane)
VALUES (0), (1), (2), (3), (4), (5), (6), (7), (8), (9), (10), (11), (12), (13), (14), (15)
ON DUPLICATE KEY UPDATE lane = lane;

-- What a relay is sending right now: written before the send, deleted when it is settled. A row
-- left behind by a dead relay makes its messages suspects.
CREATE TABLE IF NOT EXISTS postroom_lane_batch (
    lane        SMALLINT NOT NULL,
    incarnation VARCHAR(64) NOT NULL,
    batch       BIGINT NOT NULL,
    lo          BIGINT NOT NULL,
    hi          BIGINT NOT NULL,
    messages    INT NOT NULL,
    alone       BOOLEAN NOT NULL,
    held        BOOLEAN NOT NULL DEFAULT FALSE,
    PRIMARY KEY (lane, incarnation, batch)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS postroom_archive (
    day            DATE NOT NULL,
    id             CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    topic          VARCHAR(255) NOT NULL,
    `key`          VARCHAR(255),
    type           VARCHAR(255) NOT NULL,
    aggregate_type VARCHAR(255),
    aggregate_id   VARCHAR(255),
    content_type   VARCHAR(255) NOT NULL,
    headers        LONGTEXT,
    payload        LONGBLOB NOT NULL,
    size           INT NOT NULL,
    lane           SMALLINT NOT NULL,
    position       BIGINT NOT NULL,
    redrives       INT NOT NULL,
    attempts       INT NOT NULL,
    created_at     DATETIME(6) NOT NULL,
    delivered_at   DATETIME(6) NOT NULL,
    PRIMARY KEY (id, day),
    KEY archive_day (day)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS postroom_dead_letter (
    source         VARCHAR(255) NOT NULL,
    id             CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    topic          VARCHAR(255) NOT NULL,
    `key`          VARCHAR(255),
    type           VARCHAR(255) NOT NULL,
    aggregate_type VARCHAR(255),
    aggregate_id   VARCHAR(255),
    content_type   VARCHAR(255) NOT NULL,
    headers        LONGTEXT,
    payload        LONGBLOB NOT NULL,
    size           INT NOT NULL,
    lane           SMALLINT NOT NULL,
    position       BIGINT NOT NULL,
    created_at     DATETIME(6) NOT NULL,
    expires_at     DATETIME(6),
    state          VARCHAR(16) NOT NULL CHECK (state IN ('dead', 'queued', 'resolved', 'discarded')),
    holds_key      BOOLEAN NOT NULL,
    error_code     VARCHAR(255) NOT NULL,
    error          LONGTEXT NOT NULL,
    attempts       INT NOT NULL,
    history        LONGTEXT NOT NULL,
    redrives       INT NOT NULL DEFAULT 0,
    died_at        DATETIME(6) NOT NULL,
    retried_at     DATETIME(6),
    ended_at       DATETIME(6),
    note           LONGTEXT,
    PRIMARY KEY (source, id, position),
    KEY dead_letter_state (state, died_at)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS postroom_worker (
    incarnation VARCHAR(64) PRIMARY KEY,
    kind        VARCHAR(64) NOT NULL,
    name        VARCHAR(255) NOT NULL,
    started_at  DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    seen_at     DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6))
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS postroom_audit (
    id      BIGINT AUTO_INCREMENT PRIMARY KEY,
    at      DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    who     VARCHAR(255) NOT NULL,
    what    VARCHAR(255) NOT NULL,
    subject VARCHAR(255) NOT NULL,
    why     LONGTEXT
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

INSERT INTO postroom_meta (name, value) VALUES ('schema_version', '1')
ON DUPLICATE KEY UPDATE name = name;
