-- What MariaDB says differently.

-- name: keys_list
SELECT scope, operation, `key`, status, mode, attempts, epoch, recovery_point, response_status, error,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at),
       TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), locked_until) DIV 1000,
       TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) DIV 1000
  FROM postroom_idempotency_key
 WHERE (:status IS NULL OR status = :status)
   AND (:operation IS NULL OR operation = :operation)
   AND (:scope IS NULL OR scope = :scope)
 ORDER BY expires_at DESC LIMIT :rows

-- name: keys_named
SELECT scope, operation, `key`, status, mode, attempts, epoch, recovery_point, response_status, error,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at),
       TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), locked_until) DIV 1000,
       TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) DIV 1000
  FROM postroom_idempotency_key
 WHERE operation = :operation AND `key` = :key
   AND (:scope IS NULL OR scope = :scope)
 ORDER BY scope LIMIT :rows

-- name: keys_troubled
SELECT scope, operation, `key`, status, mode, attempts, epoch, recovery_point, response_status, error,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at),
       TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), locked_until) DIV 1000,
       TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) DIV 1000
  FROM postroom_idempotency_key
 WHERE error IS NOT NULL AND status = :status
   AND (:operation IS NULL OR operation = :operation)
   AND (:scope IS NULL OR scope = :scope)
 ORDER BY created_at DESC LIMIT :rows

-- name: keys_answer
SELECT response_headers, response_body, body_absent FROM postroom_idempotency_key
 WHERE scope = :scope AND operation = :operation AND `key` = :key

-- name: keys_in_trouble
SELECT COUNT(IF(status = 'indeterminate', 1, NULL)),
       COALESCE(TIMESTAMPDIFF(SECOND, MIN(IF(status = 'indeterminate', created_at, NULL)),
                              UTC_TIMESTAMP(6)), 0),
       COUNT(IF(status <> 'indeterminate', 1, NULL)),
       COALESCE(TIMESTAMPDIFF(SECOND, MIN(IF(status <> 'indeterminate', locked_until, NULL)),
                              UTC_TIMESTAMP(6)), 0)
  FROM ((SELECT status, created_at, locked_until FROM postroom_idempotency_key
          WHERE error IS NOT NULL AND status = 'indeterminate'
            AND created_at < UTC_TIMESTAMP(6) - INTERVAL :age_s SECOND LIMIT :most)
        UNION ALL
        (SELECT status, created_at, locked_until FROM postroom_idempotency_key
          WHERE locked_until < UTC_TIMESTAMP(6) - INTERVAL :age_s SECOND
            AND mode = 'resume' AND status IN ('pending', 'failed') LIMIT :most)
        UNION ALL
        (SELECT 'indeterminate', created_at, locked_until FROM postroom_idempotency_key
          WHERE locked_until < UTC_TIMESTAMP(6) - INTERVAL :age_s SECOND
            AND mode = 'external' AND status = 'pending' LIMIT :most)) k
