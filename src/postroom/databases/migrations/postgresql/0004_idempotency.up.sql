-- Idempotency keys: what became of a client's request, so that the same request again gets the same
-- answer. Only a new table: workers and publishers of earlier versions go on as before.

-- status: pending → completed | failed (may be tried again) | indeterminate (a person or `verify` decides).
-- mode: same (all in the caller's transaction, no lease), resume (from its recovery point), external.
-- The epoch grows at every take-over and stands in every write. No index holds a column that a
-- request in its own transaction changes when it ends, so that its row is updated in place.
CREATE TABLE postroom.idempotency_key (
    scope            text NOT NULL,
    operation        text NOT NULL,
    key              text NOT NULL,
    fingerprint      text NOT NULL,
    hash_version     smallint NOT NULL DEFAULT 1,
    mode             text NOT NULL,
    status           text NOT NULL,
    owner            text NOT NULL,
    epoch            bigint NOT NULL DEFAULT 1,
    attempts         integer NOT NULL DEFAULT 1,
    locked_until     timestamptz,
    expires_at       timestamptz NOT NULL,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    recovery_point   text,
    progress         text,
    request          bytea,
    response_status  integer,
    response_headers text,
    response_body    bytea,
    body_absent      text,
    error            text,
    PRIMARY KEY (operation, key, scope)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX idempotency_key_expiry ON postroom.idempotency_key (expires_at);
CREATE INDEX idempotency_key_lease ON postroom.idempotency_key (locked_until)
 WHERE locked_until IS NOT NULL;
-- Whatever went wrong, so that doubts are found among many answers.
CREATE INDEX idempotency_key_trouble ON postroom.idempotency_key (created_at)
 WHERE error IS NOT NULL;

UPDATE postroom.meta SET value = '4' WHERE name = 'schema_version';
