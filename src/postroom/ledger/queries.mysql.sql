-- What MariaDB says differently.

-- name: enter
-- What else IGNORE would pass over (values too long, or missing) was checked before.
INSERT IGNORE INTO postroom_ledger (id, scope, `key`, digest, state, request)
VALUES (:id, :scope, :key, :digest, 'accepted', :request) RETURNING 1

-- name: find
SELECT id, scope, `key`, digest, state, request, answer, attempts, error_code, error,
       adapter, note, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', accepted_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', updated_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', finished_at)
  FROM postroom_ledger WHERE scope = :scope AND `key` = :key

-- name: known
-- A locking read, since a snapshot taken before the other's commit would not show its row.
SELECT id, scope, `key`, digest, state, request, answer, attempts, error_code, error,
       adapter, note, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', accepted_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', updated_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', finished_at)
  FROM postroom_ledger WHERE scope = :scope AND `key` = :key LOCK IN SHARE MODE

-- name: find_id
SELECT id, scope, `key`, digest, state, request, answer, attempts, error_code, error,
       adapter, note, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', accepted_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', updated_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', finished_at)
  FROM postroom_ledger WHERE id = :id

-- name: find_key
SELECT id, scope, `key`, digest, state, request, answer, attempts, error_code, error,
       adapter, note, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', accepted_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', updated_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', finished_at)
  FROM postroom_ledger WHERE `key` = :key ORDER BY id LIMIT 2

-- name: progress
UPDATE postroom_ledger
   SET state = :state, attempts = :attempts, error_code = :error_code, error = :error,
       adapter = :adapter, updated_at = UTC_TIMESTAMP(6)
 WHERE id = :id AND finished_at IS NULL

-- name: finish
UPDATE postroom_ledger
   SET state = :state, attempts = :attempts, answer = :answer, error_code = :error_code,
       error = :error, adapter = :adapter, updated_at = UTC_TIMESTAMP(6), finished_at = UTC_TIMESTAMP(6)
 WHERE id = :id AND finished_at IS NULL

-- name: reopen
UPDATE postroom_ledger
   SET state = CASE WHEN state = 'failed' THEN 'accepted' ELSE state END, finished_at = NULL,
       updated_at = UTC_TIMESTAMP(6)
 WHERE id = :id AND state IN ('failed', 'unknown')

-- name: give_up
UPDATE postroom_ledger
   SET state = CASE WHEN state = 'unknown' OR :doubtful = 1 THEN 'unknown' ELSE 'failed' END,
       error_code = 'cancelled', error = :error, note = :note,
       updated_at = UTC_TIMESTAMP(6), finished_at = UTC_TIMESTAMP(6)
 WHERE id = :id AND finished_at IS NULL

-- name: resolve
UPDATE postroom_ledger
   SET state = :state, note = :note, updated_at = UTC_TIMESTAMP(6),
       error_code = CASE WHEN :state = 'succeeded' THEN NULL ELSE error_code END,
       error = CASE WHEN :state = 'succeeded' THEN NULL ELSE error END
 WHERE id = :id AND state = 'unknown' AND finished_at IS NOT NULL

-- name: lock
SELECT state FROM postroom_ledger WHERE id = :id FOR UPDATE

-- name: newest
SELECT id, scope, `key`, digest, state, request, answer, attempts, error_code, error,
       adapter, note, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', accepted_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', updated_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', finished_at)
  FROM postroom_ledger ORDER BY id DESC LIMIT :rows

-- name: newest_of
SELECT id, scope, `key`, digest, state, request, answer, attempts, error_code, error,
       adapter, note, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', accepted_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', updated_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', finished_at)
  FROM postroom_ledger WHERE state = :state ORDER BY id DESC LIMIT :rows
