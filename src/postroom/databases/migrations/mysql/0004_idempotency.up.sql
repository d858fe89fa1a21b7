-- Idempotency keys: what became of a client's request, so that the same request again gets the same
-- answer. Only a new table: workers and publishers of earlier versions go on as before.

-- status: pending → completed | failed (may be tried again) | indeterminate (a person or `verify` decides).
-- mode: same (all in the caller's transaction, no lease), resume (from its recovery point), external.
-- The epoch grows at every take-over and stands in every write.
CREATE TABLE IF NOT EXISTS postroom_idempotency_key (
    scope            VARCHAR(255) NOT NULL,
    operation        VARCHAR(255) NOT NULL,
    `key`            VARCHAR(255) NOT NULL,
    fingerprint      CHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    hash_version     SMALLINT NOT NULL DEFAULT 1,
    mode             VARCHAR(20) NOT NULL,
    status           VARCHAR(20) NOT NULL,
    owner            VARCHAR(64) NOT NULL,
    epoch            BIGINT NOT NULL DEFAULT 1,
    attempts         INT NOT NULL DEFAULT 1,
    locked_until     DATETIME(6),
    expires_at       DATETIME(6) NOT NULL,
    created_at       DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    recovery_point   VARCHAR(255),
    progress         LONGTEXT,
    request          LONGBLOB,
    response_status  INT,
    response_headers LONGTEXT,
    response_body    LONGBLOB,
    body_absent      VARCHAR(20),
    error            LONGTEXT,
    PRIMARY KEY (operation, `key`, scope),
    KEY idempotency_key_expiry (expires_at),
    KEY idempotency_key_lease (locked_until),
    KEY idempotency_key_trouble (error(8))
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

UPDATE postroom_meta SET value = '4' WHERE name = 'schema_version';
