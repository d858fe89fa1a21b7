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
   AND (:key IS NULL OR `key` = :key)
 ORDER BY expires_at DESC LIMIT :rows

-- name: keys_answer
SELECT response_headers, response_body, body_absent FROM postroom_idempotency_key
 WHERE scope = :scope AND operation = :operation AND `key` = :key
