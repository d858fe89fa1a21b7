-- What operators ask about idempotency keys.

-- name: keys_list
SELECT scope, operation, key, status, mode, attempts, epoch, recovery_point, response_status, error,
       CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM locked_until - clock_timestamp()) * 1000 AS bigint),
       CAST(extract(epoch FROM expires_at - clock_timestamp()) * 1000 AS bigint)
  FROM postroom.idempotency_key
 WHERE (CAST(:status AS text) IS NULL OR status = CAST(:status AS text))
   AND (CAST(:operation AS text) IS NULL OR operation = CAST(:operation AS text))
   AND (CAST(:scope AS text) IS NULL OR scope = CAST(:scope AS text))
   AND (CAST(:key AS text) IS NULL OR key = CAST(:key AS text))
 ORDER BY expires_at DESC LIMIT CAST(:rows AS bigint)

-- name: keys_answer
SELECT response_headers, response_body, body_absent FROM postroom.idempotency_key
 WHERE scope = :scope AND operation = :operation AND key = :key
