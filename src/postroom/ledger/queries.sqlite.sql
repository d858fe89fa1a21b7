-- What SQLite says differently: one writer at a time, so nothing needs a lock.

-- name: enter
INSERT INTO postroom_ledger (id, scope, key, digest, state, request)
VALUES (:id, :scope, :key, :digest, 'accepted', :request)
ON CONFLICT DO NOTHING;
SELECT changes();

-- name: find
SELECT id, scope, key, digest, state, request, answer, attempts, error_code, error,
       adapter, note, accepted_at, updated_at, finished_at
  FROM postroom_ledger WHERE scope = :scope AND key = :key

-- name: known
SELECT id, scope, key, digest, state, request, answer, attempts, error_code, error,
       adapter, note, accepted_at, updated_at, finished_at
  FROM postroom_ledger WHERE scope = :scope AND key = :key

-- name: find_id
SELECT id, scope, key, digest, state, request, answer, attempts, error_code, error,
       adapter, note, accepted_at, updated_at, finished_at
  FROM postroom_ledger WHERE id = :id

-- name: find_key
SELECT id, scope, key, digest, state, request, answer, attempts, error_code, error,
       adapter, note, accepted_at, updated_at, finished_at
  FROM postroom_ledger WHERE key = :key ORDER BY id LIMIT 2

-- name: progress
UPDATE postroom_ledger
   SET state = :state, attempts = :attempts, error_code = :error_code, error = :error,
       adapter = :adapter, updated_at = NOW_US
 WHERE id = :id AND finished_at IS NULL

-- name: finish
UPDATE postroom_ledger
   SET state = :state, attempts = :attempts, answer = :answer, error_code = :error_code,
       error = :error, adapter = :adapter, updated_at = NOW_US, finished_at = NOW_US
 WHERE id = :id AND finished_at IS NULL

-- name: reopen
UPDATE postroom_ledger
   SET state = CASE WHEN state = 'failed' THEN 'accepted' ELSE state END, finished_at = NULL,
       updated_at = NOW_US
 WHERE id = :id AND state IN ('failed', 'unknown')

-- name: give_up
UPDATE postroom_ledger
   SET state = CASE WHEN state = 'unknown' OR :doubtful = 1 THEN 'unknown' ELSE 'failed' END,
       error_code = 'cancelled', error = :error, note = :note, updated_at = NOW_US, finished_at = NOW_US
 WHERE id = :id AND finished_at IS NULL

-- name: resolve
UPDATE postroom_ledger
   SET state = :state, note = :note, updated_at = NOW_US,
       error_code = CASE WHEN :state = 'succeeded' THEN NULL ELSE error_code END,
       error = CASE WHEN :state = 'succeeded' THEN NULL ELSE error END
 WHERE id = :id AND state = 'unknown' AND finished_at IS NOT NULL

-- name: lock
SELECT state FROM postroom_ledger WHERE id = :id

-- name: newest
SELECT id, scope, key, digest, state, request, answer, attempts, error_code, error,
       adapter, note, accepted_at, updated_at, finished_at
  FROM postroom_ledger ORDER BY id DESC LIMIT :rows

-- name: newest_of
SELECT id, scope, key, digest, state, request, answer, attempts, error_code, error,
       adapter, note, accepted_at, updated_at, finished_at
  FROM postroom_ledger WHERE state = :state ORDER BY id DESC LIMIT :rows
