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
 ORDER BY expires_at DESC LIMIT CAST(:rows AS bigint)

-- name: keys_named
-- Of one key, whoever has it or one of them: the primary key begins so.
SELECT scope, operation, key, status, mode, attempts, epoch, recovery_point, response_status, error,
       CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM locked_until - clock_timestamp()) * 1000 AS bigint),
       CAST(extract(epoch FROM expires_at - clock_timestamp()) * 1000 AS bigint)
  FROM postroom.idempotency_key
 WHERE operation = :operation AND key = :key
   AND (CAST(:scope AS text) IS NULL OR scope = CAST(:scope AS text))
 ORDER BY scope LIMIT CAST(:rows AS bigint)

-- name: keys_troubled
-- What went wrong has an index of its own, for there may be millions of answers.
SELECT scope, operation, key, status, mode, attempts, epoch, recovery_point, response_status, error,
       CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM locked_until - clock_timestamp()) * 1000 AS bigint),
       CAST(extract(epoch FROM expires_at - clock_timestamp()) * 1000 AS bigint)
  FROM postroom.idempotency_key
 WHERE error IS NOT NULL AND status = CAST(:status AS text)
   AND (CAST(:operation AS text) IS NULL OR operation = CAST(:operation AS text))
   AND (CAST(:scope AS text) IS NULL OR scope = CAST(:scope AS text))
 ORDER BY created_at DESC LIMIT CAST(:rows AS bigint)

-- name: keys_answer
SELECT response_headers, response_body, body_absent FROM postroom.idempotency_key
 WHERE scope = :scope AND operation = :operation AND key = :key

-- name: keys_in_trouble
-- Doubts, and resumable requests that no worker goes on with: how many, and the age of the oldest.
SELECT count(*) FILTER (WHERE status = 'indeterminate'),
       CAST(coalesce(extract(epoch FROM clock_timestamp() - min(created_at)
                             FILTER (WHERE status = 'indeterminate')), 0) AS bigint),
       count(*) FILTER (WHERE status <> 'indeterminate'),
       CAST(coalesce(extract(epoch FROM clock_timestamp() - min(locked_until)
                             FILTER (WHERE status <> 'indeterminate')), 0) AS bigint)
  FROM ((SELECT status, created_at, locked_until FROM postroom.idempotency_key
          WHERE error IS NOT NULL AND status = 'indeterminate'
            AND created_at < clock_timestamp() - CAST(:age_s AS bigint) * interval '1 second'
          LIMIT CAST(:most AS bigint))
        UNION ALL
        (SELECT status, created_at, locked_until FROM postroom.idempotency_key
          WHERE locked_until < clock_timestamp() - CAST(:age_s AS bigint) * interval '1 second'
            AND mode = 'resume' AND status IN ('pending', 'failed')
          LIMIT CAST(:most AS bigint))
        UNION ALL
        (SELECT 'indeterminate', created_at, locked_until FROM postroom.idempotency_key
          WHERE locked_until < clock_timestamp() - CAST(:age_s AS bigint) * interval '1 second'
            AND mode = 'external' AND status = 'pending' LIMIT CAST(:most AS bigint))) k
