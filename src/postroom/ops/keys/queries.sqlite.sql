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
 ORDER BY expires_at DESC LIMIT :rows

-- name: keys_named
SELECT scope, operation, key, status, mode, attempts, epoch, recovery_point, response_status, error,
       created_at,
       (locked_until - NOW_US) / 1000,
       (expires_at - NOW_US) / 1000
  FROM postroom_idempotency_key
 WHERE operation = :operation AND key = :key
   AND (:scope IS NULL OR scope = :scope)
 ORDER BY scope LIMIT :rows

-- name: keys_troubled
SELECT scope, operation, key, status, mode, attempts, epoch, recovery_point, response_status, error,
       created_at,
       (locked_until - NOW_US) / 1000,
       (expires_at - NOW_US) / 1000
  FROM postroom_idempotency_key
 WHERE error IS NOT NULL AND status = :status
   AND (:operation IS NULL OR operation = :operation)
   AND (:scope IS NULL OR scope = :scope)
 ORDER BY created_at DESC LIMIT :rows

-- name: keys_answer
SELECT response_headers, response_body, body_absent FROM postroom_idempotency_key
 WHERE scope = :scope AND operation = :operation AND key = :key

-- name: keys_in_trouble
SELECT COUNT(CASE WHEN status = 'indeterminate' THEN 1 END),
       COALESCE((NOW_US - MIN(CASE WHEN status = 'indeterminate' THEN created_at END)) / 1000000, 0),
       COUNT(CASE WHEN status <> 'indeterminate' THEN 1 END),
       COALESCE((NOW_US - MIN(CASE WHEN status <> 'indeterminate' THEN locked_until END)) / 1000000,
                0)
  FROM (SELECT * FROM (SELECT status, created_at, locked_until FROM postroom_idempotency_key
                        WHERE error IS NOT NULL AND status = 'indeterminate'
                          AND created_at < NOW_US - :age_s * 1000000 LIMIT :most)
        UNION ALL
        SELECT * FROM (SELECT status, created_at, locked_until FROM postroom_idempotency_key
                        WHERE locked_until < NOW_US - :age_s * 1000000
                          AND mode = 'resume' AND status IN ('pending', 'failed') LIMIT :most)
        UNION ALL
        SELECT * FROM (SELECT 'indeterminate', created_at, locked_until FROM postroom_idempotency_key
          WHERE locked_until < NOW_US - :age_s * 1000000
            AND mode = 'external' AND status = 'pending' LIMIT :most)) k
