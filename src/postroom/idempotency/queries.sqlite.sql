-- What SQLite says differently. The first statement has the one writer's lock, and the row that is read
-- after it says whose it is: RETURNING would need SQLite 3.35.

-- name: claim
INSERT INTO postroom_idempotency_key
       (scope, operation, key, fingerprint, mode, status, owner, locked_until, lease_us,
        expires_at, request)
VALUES (:scope, :operation, :key, :fingerprint, :mode, 'pending', :owner, NOW_US + :lease_us,
        :lease_us,
        NOW_US + :keep_us, :request)
ON CONFLICT (scope, operation, key) DO UPDATE
   SET recovery_point = CASE WHEN expires_at > NOW_US OR status = 'pending'
                          OR (status = 'failed' AND mode = 'resume') THEN recovery_point END,
       progress = CASE WHEN expires_at > NOW_US OR status = 'pending'
                          OR (status = 'failed' AND mode = 'resume') THEN progress END,
       attempts = CASE WHEN expires_at > NOW_US OR status = 'pending'
                          OR (status = 'failed' AND mode = 'resume') THEN attempts + 1 ELSE 1 END,
       created_at = CASE WHEN expires_at > NOW_US OR status = 'pending'
                          OR (status = 'failed' AND mode = 'resume')
                         THEN created_at ELSE NOW_US END,
       fingerprint = excluded.fingerprint, mode = excluded.mode, status = 'pending',
       owner = excluded.owner, epoch = epoch + 1, locked_until = excluded.locked_until,
       lease_us = excluded.lease_us,
       expires_at = excluded.expires_at, request = excluded.request, response_status = NULL,
       response_headers = NULL, response_body = NULL, body_absent = NULL, error = NULL
 WHERE (expires_at <= NOW_US
        AND (status = 'completed' OR (status = 'failed' AND mode <> 'resume'))) OR
       (fingerprint = excluded.fingerprint
        AND (status = 'failed' OR (status = 'pending' AND mode = 'resume'
                                   AND locked_until <= NOW_US)));
SELECT owner, epoch, status, mode, fingerprint, attempts, locked_until - NOW_US, recovery_point,
       progress, request, response_status, response_headers, response_body, body_absent
  FROM postroom_idempotency_key
 WHERE scope = :scope AND operation = :operation AND key = :key;

-- name: look
SELECT owner, epoch, status, mode, fingerprint, attempts, locked_until - NOW_US, recovery_point,
       progress, request, response_status, response_headers, response_body, body_absent
  FROM postroom_idempotency_key
 WHERE scope = :scope AND operation = :operation AND key = :key

-- name: finish
UPDATE postroom_idempotency_key
   SET status = 'completed', locked_until = NULL, error = NULL, request = NULL, progress = NULL,
       response_status = :response_status, response_headers = :response_headers,
       response_body = :response_body, body_absent = :body_absent,
       expires_at = CASE WHEN mode = 'same' AND expires_at > NOW_US + :keep_us * 9 / 10
                         THEN expires_at ELSE NOW_US + :keep_us END
 WHERE scope = :scope AND operation = :operation AND key = :key AND owner = :owner
   AND epoch = :epoch AND status IN ('pending', 'indeterminate');
SELECT 1 WHERE changes() > 0;

-- name: fail
UPDATE postroom_idempotency_key
   SET status = 'failed', error = :error,
       attempts = CASE WHEN mode = 'resume' AND :delay_us IS NULL THEN attempts - 1 ELSE attempts END,
       locked_until = NOW_US + :delay_us, expires_at = NOW_US + :keep_us
 WHERE scope = :scope AND operation = :operation AND key = :key AND owner = :owner
   AND epoch = :epoch AND status IN ('pending', 'indeterminate');
SELECT 1 WHERE changes() > 0;

-- name: doubt
UPDATE postroom_idempotency_key
   SET status = 'indeterminate', locked_until = NULL, error = :error
 WHERE scope = :scope AND operation = :operation AND key = :key AND owner = :owner
   AND epoch = :epoch AND status = 'pending';
SELECT 1 WHERE changes() > 0;

-- name: lose
UPDATE postroom_idempotency_key
   SET status = 'indeterminate', locked_until = NULL, error = 'the process that had it was lost'
 WHERE scope = :scope AND operation = :operation AND key = :key AND epoch = :epoch
   AND status = 'pending' AND ((mode = 'external' AND locked_until <= NOW_US)
                               OR (mode = 'same' AND locked_until IS NULL));
SELECT 1 WHERE changes() > 0;

-- name: lost
SELECT * FROM (SELECT scope, operation, key, epoch FROM postroom_idempotency_key
 WHERE locked_until <= NOW_US AND mode = 'external' AND status = 'pending'
 ORDER BY locked_until LIMIT :rows)
UNION ALL
SELECT * FROM (SELECT scope, operation, key, epoch FROM postroom_idempotency_key
 WHERE expires_at <= NOW_US AND mode = 'same' AND status = 'pending'
 ORDER BY expires_at LIMIT :rows)

-- name: cap
UPDATE postroom_idempotency_key SET locked_until = NOW_US + COALESCE(lease_us, :lease_us)
 WHERE scope = :scope AND operation = :operation AND key = :key AND status = 'pending'
   AND locked_until > NOW_US + COALESCE(lease_us, :lease_us);
SELECT 1 WHERE changes() > 0;

-- name: cap_all
UPDATE postroom_idempotency_key SET locked_until = NOW_US + lease_us
 WHERE locked_until > NOW_US AND status = 'pending' AND locked_until > NOW_US + lease_us

-- name: beat
UPDATE postroom_idempotency_key SET locked_until = NOW_US + :lease_us, lease_us = :lease_us
 WHERE scope = :scope AND operation = :operation AND key = :key AND owner = :owner
   AND epoch = :epoch AND status = 'pending';
SELECT 1 WHERE changes() > 0;

-- name: advance
UPDATE postroom_idempotency_key
   SET recovery_point = :recovery_point, progress = :progress, locked_until = NOW_US + :lease_us,
       lease_us = :lease_us
 WHERE scope = :scope AND operation = :operation AND key = :key AND owner = :owner
   AND epoch = :epoch AND status = 'pending';
SELECT 1 WHERE changes() > 0;

-- name: settle
UPDATE postroom_idempotency_key
   SET status = :status, epoch = epoch + 1,
       locked_until = CASE WHEN :status = 'failed' AND mode = 'resume' THEN NOW_US END,
       attempts = CASE WHEN :status = 'failed' AND mode = 'resume' THEN 0 ELSE attempts END,
       request = CASE WHEN :status = 'failed' THEN request END,
       progress = CASE WHEN :status = 'failed' THEN progress END,
       response_status = :response_status, response_headers = :response_headers,
       response_body = :response_body, body_absent = :body_absent, error = :error,
       expires_at = MAX(expires_at, NOW_US + :keep_us)
 WHERE scope = :scope AND operation = :operation AND key = :key AND epoch = :epoch
   AND status = 'indeterminate';
SELECT 1 WHERE changes() > 0;

-- name: orphans
SELECT scope, operation, key, epoch, attempts FROM postroom_idempotency_key
 WHERE locked_until <= NOW_US AND mode = 'resume' AND status IN ('pending', 'failed')
   AND instr(char(31) || :operations || char(31), char(31) || operation || char(31)) > 0
 ORDER BY locked_until LIMIT :rows

-- name: adopt
UPDATE postroom_idempotency_key
   SET owner = :owner, epoch = epoch + 1, attempts = attempts + 1, status = 'pending',
       locked_until = NOW_US + :lease_us, lease_us = :lease_us
 WHERE scope = :scope AND operation = :operation AND key = :key AND epoch = :epoch
   AND mode = 'resume' AND status IN ('pending', 'failed') AND locked_until <= NOW_US;
SELECT 1 WHERE changes() > 0;

-- name: patience
-- The file's lock is waited for by the connection's own busy_timeout.
SELECT 0

-- name: be_patient
SELECT :wait
