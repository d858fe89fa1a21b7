-- Idempotency keys: who may carry a request out, and what it was answered. Every write but the claim
-- itself names the epoch it was made under; times are the database's own.

-- name: claim
-- One statement: a key nobody has, or that may be taken over, is ours; else we read what became of it.
-- Waits for whoever is inserting the same key in a transaction. No row at all: somebody committed after
-- our snapshot, so look. What is answered already is read without a lock. A resumable request that
-- failed never expires: what stands behind its points has been done.
WITH there AS MATERIALIZED (
    SELECT k.*, (k.expires_at <= clock_timestamp() AND
            (k.status = 'completed' OR (k.status = 'failed' AND k.mode <> 'resume'))) OR
           (k.fingerprint = CAST(:fingerprint AS text)
            AND (k.status = 'failed' OR (k.status = 'pending' AND k.mode = 'resume'
                                         AND k.locked_until <= clock_timestamp()))) AS free
      FROM postroom.idempotency_key k
     WHERE k.scope = CAST(:scope AS text) AND k.operation = CAST(:operation AS text)
       AND k.key = CAST(:key AS text)),
mine AS (
    INSERT INTO postroom.idempotency_key AS k
           (scope, operation, key, fingerprint, mode, status, owner, locked_until, lease_us,
           expires_at, request)
    SELECT CAST(:scope AS text), CAST(:operation AS text), CAST(:key AS text),
           CAST(:fingerprint AS text), CAST(:mode AS text), 'pending', CAST(:owner AS text),
           clock_timestamp() + CAST(:lease_us AS bigint) * interval '1 microsecond',
           CAST(:lease_us AS bigint),
           clock_timestamp() + CAST(:keep_us AS bigint) * interval '1 microsecond',
           CAST(:request AS bytea)
     WHERE NOT EXISTS (SELECT 1 FROM there t WHERE NOT t.free)
    ON CONFLICT (scope, operation, key) DO UPDATE
       SET recovery_point = CASE WHEN k.expires_at > clock_timestamp() OR k.status = 'pending'
                                  OR (k.status = 'failed' AND k.mode = 'resume')
                                 THEN k.recovery_point END,
           progress = CASE WHEN k.expires_at > clock_timestamp() OR k.status = 'pending'
                                  OR (k.status = 'failed' AND k.mode = 'resume')
                           THEN k.progress END,
           attempts = CASE WHEN k.expires_at > clock_timestamp() OR k.status = 'pending'
                                  OR (k.status = 'failed' AND k.mode = 'resume')
                           THEN k.attempts + 1 ELSE 1 END,
           created_at = CASE WHEN k.expires_at > clock_timestamp() OR k.status = 'pending'
                                  OR (k.status = 'failed' AND k.mode = 'resume')
                             THEN k.created_at ELSE clock_timestamp() END,
           fingerprint = excluded.fingerprint, mode = excluded.mode, status = 'pending',
           owner = excluded.owner, epoch = k.epoch + 1, locked_until = excluded.locked_until,
           lease_us = excluded.lease_us,
           expires_at = excluded.expires_at, request = excluded.request, response_status = NULL,
           response_headers = NULL, response_body = NULL, body_absent = NULL, error = NULL
     WHERE (k.expires_at <= clock_timestamp() AND
            (k.status = 'completed' OR (k.status = 'failed' AND k.mode <> 'resume'))) OR
           (k.fingerprint = excluded.fingerprint
            AND (k.status = 'failed' OR (k.status = 'pending' AND k.mode = 'resume'
                                         AND k.locked_until <= clock_timestamp())))
    RETURNING owner, epoch, status, mode, fingerprint, attempts, locked_until, recovery_point,
              progress, request)
SELECT owner, epoch, status, mode, fingerprint, attempts,
       CAST(extract(epoch FROM locked_until - clock_timestamp()) * 1000000 AS bigint),
       recovery_point, progress, request, CAST(NULL AS integer), CAST(NULL AS text),
       CAST(NULL AS bytea), CAST(NULL AS text)
  FROM mine
UNION ALL
SELECT owner, epoch, status, mode, fingerprint, attempts,
       CAST(extract(epoch FROM locked_until - clock_timestamp()) * 1000000 AS bigint),
       recovery_point, progress, request, response_status, response_headers, response_body,
       body_absent
  FROM there WHERE NOT free

-- name: look
SELECT owner, epoch, status, mode, fingerprint, attempts,
       CAST(extract(epoch FROM locked_until - clock_timestamp()) * 1000000 AS bigint),
       recovery_point, progress, request, response_status, response_headers, response_body,
       body_absent
  FROM postroom.idempotency_key
 WHERE scope = :scope AND operation = :operation AND key = :key

-- name: finish
-- Whoever was taken for lost and comes back with the answer settles its own key, if nobody else has.
-- In its route's transaction a row expires as its claim said, so that it is updated in place, unless a
-- tenth of that time went by: who has waited for a long route must not find it expired.
UPDATE postroom.idempotency_key
   SET status = 'completed', locked_until = NULL, error = NULL, request = NULL, progress = NULL,
       response_status = CAST(:response_status AS integer),
       response_headers = CAST(:response_headers AS text),
       response_body = CAST(:response_body AS bytea), body_absent = CAST(:body_absent AS text),
       expires_at = CASE WHEN mode = 'same' AND expires_at > clock_timestamp()
                               + CAST(:keep_us AS bigint) * 9 / 10 * interval '1 microsecond'
                         THEN expires_at ELSE
           clock_timestamp() + CAST(:keep_us AS bigint) * interval '1 microsecond' END
 WHERE scope = :scope AND operation = :operation AND key = :key AND owner = :owner
   AND epoch = :epoch AND status IN ('pending', 'indeterminate')
RETURNING 1

-- name: fail
-- Nothing was done: the same request may try again. In `resume` a worker does, when its time comes;
-- without a time its client may, and the attempt counts for nothing.
UPDATE postroom.idempotency_key
   SET status = 'failed', error = CAST(:error AS text),
       attempts = CASE WHEN mode = 'resume' AND CAST(:delay_us AS bigint) IS NULL
                       THEN attempts - 1 ELSE attempts END,
       locked_until = clock_timestamp() + CAST(:delay_us AS bigint) * interval '1 microsecond',
       expires_at = clock_timestamp() + CAST(:keep_us AS bigint) * interval '1 microsecond'
 WHERE scope = :scope AND operation = :operation AND key = :key AND owner = :owner
   AND epoch = :epoch AND status IN ('pending', 'indeterminate')
RETURNING 1

-- name: doubt
-- Its owner cannot say what it did.
UPDATE postroom.idempotency_key
   SET status = 'indeterminate', locked_until = NULL, error = CAST(:error AS text)
 WHERE scope = :scope AND operation = :operation AND key = :key AND owner = :owner
   AND epoch = :epoch AND status = 'pending'
RETURNING 1

-- name: lose
-- Its owner is gone: the lease is over, and only `resume` may go on from there. Or a transaction that was
-- to hold everything was committed without its answer: ours would not see it otherwise.
UPDATE postroom.idempotency_key
   SET status = 'indeterminate', locked_until = NULL,
       error = 'the process that had it was lost'
 WHERE scope = :scope AND operation = :operation AND key = :key AND epoch = :epoch
   AND status = 'pending' AND ((mode = 'external' AND locked_until <= clock_timestamp())
                               OR (mode = 'same' AND locked_until IS NULL))
RETURNING 1

-- name: lost
-- Requests whose owner is gone: to be told of, whether or not their clients come back.
(SELECT scope, operation, key, epoch FROM postroom.idempotency_key
 WHERE locked_until <= statement_timestamp() AND mode = 'external' AND status = 'pending'
 ORDER BY locked_until LIMIT CAST(:rows AS bigint))
UNION ALL
(SELECT scope, operation, key, epoch FROM postroom.idempotency_key
 WHERE expires_at <= statement_timestamp() AND mode = 'same' AND status = 'pending'
 ORDER BY expires_at LIMIT CAST(:rows AS bigint))

-- name: cap
-- A lease that ends later than its owner could have written it: the database's clock went back. It
-- ends one lease from now; an owner that lives renews it before, so it is never taken from one.
UPDATE postroom.idempotency_key
   SET locked_until = clock_timestamp()
                      + coalesce(lease_us, CAST(:lease_us AS bigint)) * interval '1 microsecond'
 WHERE scope = :scope AND operation = :operation AND key = :key AND status = 'pending'
   AND locked_until > clock_timestamp()
                      + coalesce(lease_us, CAST(:lease_us AS bigint)) * interval '1 microsecond'
RETURNING 1

-- name: cap_all
-- The same for every request in flight.
UPDATE postroom.idempotency_key
   SET locked_until = clock_timestamp() + lease_us * interval '1 microsecond'
 WHERE locked_until > statement_timestamp() AND status = 'pending'
   AND locked_until > clock_timestamp() + lease_us * interval '1 microsecond'

-- name: beat
UPDATE postroom.idempotency_key
   SET locked_until = clock_timestamp() + CAST(:lease_us AS bigint) * interval '1 microsecond',
       lease_us = CAST(:lease_us AS bigint)
 WHERE scope = :scope AND operation = :operation AND key = :key AND owner = :owner
   AND epoch = :epoch AND status = 'pending'
RETURNING 1

-- name: advance
-- In the transaction of the work itself: a recovery point and what was done are there together.
UPDATE postroom.idempotency_key
   SET recovery_point = CAST(:recovery_point AS text), progress = CAST(:progress AS text),
       locked_until = clock_timestamp() + CAST(:lease_us AS bigint) * interval '1 microsecond',
       lease_us = CAST(:lease_us AS bigint)
 WHERE scope = :scope AND operation = :operation AND key = :key AND owner = :owner
   AND epoch = :epoch AND status = 'pending'
RETURNING 1

-- name: settle
-- `verify` or an operator has found out; the epoch ends whatever its owner might still write. An
-- operator does not know the policy, so what is kept longer stays so.
UPDATE postroom.idempotency_key
   SET status = CAST(:status AS text), epoch = epoch + 1,
       locked_until = CASE WHEN CAST(:status AS text) = 'failed' AND mode = 'resume'
                           THEN clock_timestamp() END,
       attempts = CASE WHEN CAST(:status AS text) = 'failed' AND mode = 'resume' THEN 0 ELSE attempts END,
       request = CASE WHEN CAST(:status AS text) = 'failed' THEN request END,
       progress = CASE WHEN CAST(:status AS text) = 'failed' THEN progress END,
       response_status = CAST(:response_status AS integer),
       response_headers = CAST(:response_headers AS text),
       response_body = CAST(:response_body AS bytea), body_absent = CAST(:body_absent AS text),
       error = CAST(:error AS text),
       expires_at = greatest(expires_at, clock_timestamp()
                                         + CAST(:keep_us AS bigint) * interval '1 microsecond')
 WHERE scope = :scope AND operation = :operation AND key = :key AND epoch = :epoch
   AND status = 'indeterminate'
RETURNING 1

-- name: orphans
-- Resumable requests whose process is gone, or that failed and whose next attempt has come.
SELECT scope, operation, key, epoch, attempts FROM postroom.idempotency_key
 WHERE locked_until <= statement_timestamp() AND mode = 'resume' AND status IN ('pending', 'failed')
   AND operation = ANY(string_to_array(CAST(:operations AS text), chr(31)))
 ORDER BY locked_until LIMIT CAST(:rows AS bigint)

-- name: adopt
-- A worker takes one over; of two that try, one finds the epoch changed.
UPDATE postroom.idempotency_key
   SET owner = CAST(:owner AS text), epoch = epoch + 1, attempts = attempts + 1, status = 'pending',
       locked_until = clock_timestamp() + CAST(:lease_us AS bigint) * interval '1 microsecond',
       lease_us = CAST(:lease_us AS bigint)
 WHERE scope = :scope AND operation = :operation AND key = :key AND epoch = :epoch
   AND mode = 'resume' AND status IN ('pending', 'failed') AND locked_until <= clock_timestamp()
RETURNING 1

-- name: patience
SELECT current_setting('lock_timeout')

-- name: be_patient
-- How long this transaction waits for a lock, as a text such as 500ms.
SELECT set_config('lock_timeout', CAST(:wait AS text), true)
