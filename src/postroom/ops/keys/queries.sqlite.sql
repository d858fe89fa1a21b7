-- What SQLite says differently.

-- name: keys_list
SELECT scope, operation, key, status, mode, attempts, epoch, recovery_point, response_status, error,
       created_at,
       (locked_until - NOW_US) / 1000,
       (expires_at - NOW_US) / 1000
  FROM postroom_idempotency_key
 WHERE (:status IS NULL OR status = :status)
   AND (:operation IS NULL OR operation = :operation)
   AND (:scope IS NULL OR scope = :scope)
   AND (:key IS NULL OR key = :key)
 ORDER BY expires_at DESC LIMIT :rows

-- name: keys_answer
SELECT response_headers, response_body, body_absent FROM postroom_idempotency_key
 WHERE scope = :scope AND operation = :operation AND key = :key
