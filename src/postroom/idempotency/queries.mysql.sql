-- What MariaDB says differently.

-- name: claim
-- Assignments are made in their order, and see those before them: the owner says whether we have taken
-- it, and what the conditions ask for changes last.
INSERT INTO postroom_idempotency_key
       (scope, operation, `key`, fingerprint, mode, status, owner, locked_until, lease_us,
        expires_at, request)
VALUES (:scope, :operation, :key, :fingerprint, :mode, 'pending', :owner,
        UTC_TIMESTAMP(6) + INTERVAL :lease_us MICROSECOND, :lease_us,
        UTC_TIMESTAMP(6) + INTERVAL :keep_us MICROSECOND, :request)
ON DUPLICATE KEY UPDATE
    owner = IF((expires_at <= UTC_TIMESTAMP(6) AND
                (status = 'completed' OR (status = 'failed' AND mode <> 'resume'))) OR
               (fingerprint = VALUES(fingerprint)
                AND (status = 'failed' OR (status = 'pending' AND mode = 'resume'
                                           AND locked_until <= UTC_TIMESTAMP(6)))),
               VALUES(owner), owner),
    recovery_point = IF(owner = VALUES(owner) AND status <> 'pending'
                        AND NOT (status = 'failed' AND mode = 'resume')
                        AND expires_at <= UTC_TIMESTAMP(6), NULL, recovery_point),
    progress = IF(owner = VALUES(owner) AND status <> 'pending'
                        AND NOT (status = 'failed' AND mode = 'resume')
                  AND expires_at <= UTC_TIMESTAMP(6), NULL, progress),
    attempts = IF(owner = VALUES(owner),
                  IF(status <> 'pending' AND NOT (status = 'failed' AND mode = 'resume')
                     AND expires_at <= UTC_TIMESTAMP(6), 1, attempts + 1),
                  attempts),
    created_at = IF(owner = VALUES(owner) AND status <> 'pending'
                        AND NOT (status = 'failed' AND mode = 'resume')
                    AND expires_at <= UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), created_at),
    epoch = IF(owner = VALUES(owner), epoch + 1, epoch),
    fingerprint = IF(owner = VALUES(owner), VALUES(fingerprint), fingerprint),
    mode = IF(owner = VALUES(owner), VALUES(mode), mode),
    request = IF(owner = VALUES(owner), VALUES(request), request),
    response_status = IF(owner = VALUES(owner), NULL, response_status),
    response_headers = IF(owner = VALUES(owner), NULL, response_headers),
    response_body = IF(owner = VALUES(owner), NULL, response_body),
    body_absent = IF(owner = VALUES(owner), NULL, body_absent),
    error = IF(owner = VALUES(owner), NULL, error),
    locked_until = IF(owner = VALUES(owner), VALUES(locked_until), locked_until),
    lease_us = IF(owner = VALUES(owner), VALUES(lease_us), lease_us),
    status = IF(owner = VALUES(owner), 'pending', status),
    expires_at = IF(owner = VALUES(owner), VALUES(expires_at), expires_at)
RETURNING owner, epoch, status, mode, fingerprint, attempts,
          TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), locked_until), recovery_point, progress,
          request, response_status, response_headers, response_body, body_absent

-- name: look
-- A locking read, since a snapshot taken before another's commit would not show its row.
SELECT owner, epoch, status, mode, fingerprint, attempts,
       TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), locked_until), recovery_point, progress, request,
       response_status, response_headers, response_body, body_absent
  FROM postroom_idempotency_key
 WHERE scope = :scope AND operation = :operation AND `key` = :key LOCK IN SHARE MODE

-- name: finish
UPDATE postroom_idempotency_key
   SET status = 'completed', locked_until = NULL, error = NULL, request = NULL, progress = NULL,
       response_status = :response_status, response_headers = :response_headers,
       response_body = :response_body, body_absent = :body_absent,
       expires_at = IF(mode = 'same' AND expires_at > UTC_TIMESTAMP(6) + INTERVAL :keep_us * 9 DIV 10 MICROSECOND,
                       expires_at, UTC_TIMESTAMP(6) + INTERVAL :keep_us MICROSECOND)
 WHERE scope = :scope AND operation = :operation AND `key` = :key AND owner = :owner
   AND epoch = :epoch AND status IN ('pending', 'indeterminate');
SELECT 1 FROM DUAL WHERE ROW_COUNT() > 0;

-- name: fail
UPDATE postroom_idempotency_key
   SET status = 'failed', error = :error,
       attempts = CASE WHEN mode = 'resume' AND :delay_us IS NULL THEN attempts - 1 ELSE attempts END,
       locked_until = UTC_TIMESTAMP(6) + INTERVAL :delay_us MICROSECOND,
       expires_at = UTC_TIMESTAMP(6) + INTERVAL :keep_us MICROSECOND
 WHERE scope = :scope AND operation = :operation AND `key` = :key AND owner = :owner
   AND epoch = :epoch AND status IN ('pending', 'indeterminate');
SELECT 1 FROM DUAL WHERE ROW_COUNT() > 0;

-- name: doubt
UPDATE postroom_idempotency_key
   SET status = 'indeterminate', locked_until = NULL, error = :error
 WHERE scope = :scope AND operation = :operation AND `key` = :key AND owner = :owner
   AND epoch = :epoch AND status = 'pending';
SELECT 1 FROM DUAL WHERE ROW_COUNT() > 0;

-- name: lose
UPDATE postroom_idempotency_key
   SET status = 'indeterminate', locked_until = NULL, error = 'the process that had it was lost'
 WHERE scope = :scope AND operation = :operation AND `key` = :key AND epoch = :epoch
   AND status = 'pending' AND ((mode = 'external' AND locked_until <= UTC_TIMESTAMP(6))
                               OR (mode = 'same' AND locked_until IS NULL));
SELECT 1 FROM DUAL WHERE ROW_COUNT() > 0;

-- name: lost
(SELECT scope, operation, `key`, epoch FROM postroom_idempotency_key
 WHERE locked_until <= UTC_TIMESTAMP(6) AND mode = 'external' AND status = 'pending'
 ORDER BY locked_until LIMIT :rows)
UNION ALL
(SELECT scope, operation, `key`, epoch FROM postroom_idempotency_key
 WHERE expires_at <= UTC_TIMESTAMP(6) AND mode = 'same' AND status = 'pending'
 ORDER BY expires_at LIMIT :rows)

-- name: cap
UPDATE postroom_idempotency_key
   SET locked_until = UTC_TIMESTAMP(6) + INTERVAL COALESCE(lease_us, :lease_us) MICROSECOND
 WHERE scope = :scope AND operation = :operation AND `key` = :key AND status = 'pending'
   AND locked_until > UTC_TIMESTAMP(6) + INTERVAL COALESCE(lease_us, :lease_us) MICROSECOND;
SELECT 1 FROM DUAL WHERE ROW_COUNT() > 0;

-- name: cap_all
UPDATE postroom_idempotency_key
   SET locked_until = UTC_TIMESTAMP(6) + INTERVAL lease_us MICROSECOND
 WHERE locked_until > UTC_TIMESTAMP(6) AND status = 'pending'
   AND locked_until > UTC_TIMESTAMP(6) + INTERVAL lease_us MICROSECOND

-- name: beat
UPDATE postroom_idempotency_key
   SET locked_until = UTC_TIMESTAMP(6) + INTERVAL :lease_us MICROSECOND, lease_us = :lease_us
 WHERE scope = :scope AND operation = :operation AND `key` = :key AND owner = :owner
   AND epoch = :epoch AND status = 'pending';
SELECT 1 FROM DUAL WHERE ROW_COUNT() > 0;

-- name: advance
UPDATE postroom_idempotency_key
   SET recovery_point = :recovery_point, progress = :progress,
       locked_until = UTC_TIMESTAMP(6) + INTERVAL :lease_us MICROSECOND, lease_us = :lease_us
 WHERE scope = :scope AND operation = :operation AND `key` = :key AND owner = :owner
   AND epoch = :epoch AND status = 'pending';
SELECT 1 FROM DUAL WHERE ROW_COUNT() > 0;

-- name: settle
UPDATE postroom_idempotency_key
   SET status = :status, epoch = epoch + 1,
       locked_until = CASE WHEN :status = 'failed' AND mode = 'resume' THEN UTC_TIMESTAMP(6) END,
       attempts = CASE WHEN :status = 'failed' AND mode = 'resume' THEN 0 ELSE attempts END,
       request = CASE WHEN :status = 'failed' THEN request END,
       progress = CASE WHEN :status = 'failed' THEN progress END,
       response_status = :response_status, response_headers = :response_headers,
       response_body = :response_body, body_absent = :body_absent, error = :error,
       expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL :keep_us MICROSECOND)
 WHERE scope = :scope AND operation = :operation AND `key` = :key AND epoch = :epoch
   AND status = 'indeterminate';
SELECT 1 FROM DUAL WHERE ROW_COUNT() > 0;

-- name: orphans
SELECT scope, operation, `key`, epoch, attempts FROM postroom_idempotency_key
 WHERE locked_until <= UTC_TIMESTAMP(6) AND mode = 'resume' AND status IN ('pending', 'failed')
   AND LOCATE(CONCAT(CHAR(31), operation, CHAR(31)), CONCAT(CHAR(31), :operations, CHAR(31))) > 0
 ORDER BY locked_until LIMIT :rows

-- name: adopt
UPDATE postroom_idempotency_key
   SET owner = :owner, epoch = epoch + 1, attempts = attempts + 1, status = 'pending',
       locked_until = UTC_TIMESTAMP(6) + INTERVAL :lease_us MICROSECOND, lease_us = :lease_us
 WHERE scope = :scope AND operation = :operation AND `key` = :key AND epoch = :epoch
   AND mode = 'resume' AND status IN ('pending', 'failed') AND locked_until <= UTC_TIMESTAMP(6);
SELECT 1 FROM DUAL WHERE ROW_COUNT() > 0;

-- name: patience
SELECT @@session.innodb_lock_wait_timeout

-- name: be_patient
-- In whole seconds, and at least one.
SET SESSION innodb_lock_wait_timeout = :wait_s
