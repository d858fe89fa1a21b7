-- What consumers keep: whose turn it is to receive, and what waits to be handled again. Only new tables:
-- workers and publishers of earlier versions go on as before, and nothing that exists is rewritten.

-- Who receives from a source of a broker for a consumer. The epoch grows at every take-over; a handler's
-- transaction locks the row it believes to be its own, so whoever wakes up late applies nothing.
CREATE TABLE IF NOT EXISTS postroom_seat (
    consumer VARCHAR(100) NOT NULL,
    source   VARCHAR(255) NOT NULL,
    owner    VARCHAR(64) NOT NULL,
    epoch    BIGINT NOT NULL,
    taken_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (consumer, source)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- Waiting in a consumer: a message whose handler failed, in its back-off, and whatever of its key must
-- not pass it. Only the head of a key has next_attempt_at; a blocked head is a dead letter that holds
-- its key, unless it was set aside. Positions are given by arrival.
CREATE TABLE IF NOT EXISTS postroom_inbox_held (
    consumer        VARCHAR(100) NOT NULL,
    position        BIGINT NOT NULL AUTO_INCREMENT,
    message_id      VARCHAR(255) NOT NULL,
    topic           VARCHAR(255) NOT NULL,
    `key`           VARCHAR(255),
    type            VARCHAR(255) NOT NULL,
    content_type    VARCHAR(255) NOT NULL,
    headers         LONGTEXT,
    payload         LONGBLOB NOT NULL,
    size            INT NOT NULL,
    redrives        INT NOT NULL DEFAULT 0,
    held_at         DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    attempts        INT NOT NULL DEFAULT 0,
    history         LONGTEXT,
    error_code      VARCHAR(255),
    error           LONGTEXT,
    next_attempt_at DATETIME(6),
    blocked         BOOLEAN NOT NULL DEFAULT FALSE,
    aside           BOOLEAN NOT NULL DEFAULT FALSE,
    PRIMARY KEY (consumer, position),
    UNIQUE KEY inbox_held_position (position),
    UNIQUE KEY inbox_held_id (consumer, message_id),
    KEY inbox_held_key (consumer, topic, `key`, position),
    KEY inbox_held_due (consumer, next_attempt_at)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

UPDATE postroom_meta SET value = '3' WHERE name = 'schema_version';
