-- Idempotency keys: what became of a client's request, so that the same request again gets the same
-- answer. Only a new table: workers and publishers of earlier versions go on as before.

-- status: pending → completed | failed (may be tried again) | indeterminate (a person or `verify` decides).
-- mode: same (all in the caller's transaction, no lease), resume (from its recovery point), external.
-- The epoch grows at every take-over and stands in every write.
CREATE TABLE postroom_idempotency_key (
    scope            TEXT NOT NULL,
    operation        TEXT NOT NULL,
    key              TEXT NOT NULL,
    fingerprint      TEXT NOT NULL,
    hash_version     INTEGER NOT NULL DEFAULT 1,
    mode             TEXT NOT NULL,
    status           TEXT NOT NULL,
    owner            TEXT NOT NULL,
    epoch            INTEGER NOT NULL DEFAULT 1,
    attempts         INTEGER NOT NULL DEFAULT 1,
    locked_until     INTEGER,
    expires_at       INTEGER NOT NULL,
    created_at       INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)),
    recovery_point   TEXT,
    progress         TEXT,
    request          BLOB,
    response_status  INTEGER,
    response_headers TEXT,
    response_body    BLOB,
    body_absent      TEXT,
    error            TEXT,
    PRIMARY KEY (operation, key, scope)
);
CREATE INDEX postroom_idempotency_key_expiry ON postroom_idempotency_key (expires_at);
CREATE INDEX postroom_idempotency_key_lease ON postroom_idempotency_key (locked_until)
 WHERE locked_until IS NOT NULL;
CREATE INDEX postroom_idempotency_key_trouble ON postroom_idempotency_key (created_at)
 WHERE error IS NOT NULL;

UPDATE postroom_meta SET value = '4' WHERE name = 'schema_version';
