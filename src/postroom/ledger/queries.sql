-- The register of requests. What is finished is never changed by a relay again: a copy of its message
-- that comes later finds nothing to say.

-- name: enter
-- Insert first: two requests of one key meet at the index, where the second waits for the first.
INSERT INTO postroom.ledger (id, scope, key, digest, state, request)
VALUES (CAST(CAST(:id AS text) AS uuid), CAST(:scope AS text), CAST(:key AS text),
        CAST(:digest AS text), 'accepted', CAST(:request AS bytea))
ON CONFLICT DO NOTHING RETURNING 1

-- name: find
SELECT CAST(id AS text), scope, key, digest, state, request, answer, attempts, error_code, error,
       adapter, note, CAST(extract(epoch FROM accepted_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM updated_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM finished_at) * 1000000 AS bigint)
  FROM postroom.ledger WHERE scope = CAST(:scope AS text) AND key = CAST(:key AS text)

-- name: known
-- As `find`, for whoever found the key taken a moment ago.
SELECT CAST(id AS text), scope, key, digest, state, request, answer, attempts, error_code, error,
       adapter, note, CAST(extract(epoch FROM accepted_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM updated_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM finished_at) * 1000000 AS bigint)
  FROM postroom.ledger WHERE scope = CAST(:scope AS text) AND key = CAST(:key AS text)

-- name: find_id
SELECT CAST(id AS text), scope, key, digest, state, request, answer, attempts, error_code, error,
       adapter, note, CAST(extract(epoch FROM accepted_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM updated_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM finished_at) * 1000000 AS bigint)
  FROM postroom.ledger WHERE id = CAST(CAST(:id AS text) AS uuid)

-- name: find_key
-- In whatever scope.
SELECT CAST(id AS text), scope, key, digest, state, request, answer, attempts, error_code, error,
       adapter, note, CAST(extract(epoch FROM accepted_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM updated_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM finished_at) * 1000000 AS bigint)
  FROM postroom.ledger WHERE key = CAST(:key AS text) ORDER BY id LIMIT 2

-- name: progress
-- Tried, and not over: what was said last.
UPDATE postroom.ledger
   SET state = CAST(:state AS text), attempts = CAST(:attempts AS integer),
       error_code = CAST(:error_code AS text), error = CAST(:error AS text),
       adapter = CAST(:adapter AS text), updated_at = clock_timestamp()
 WHERE id = CAST(CAST(:id AS text) AS uuid) AND finished_at IS NULL

-- name: finish
UPDATE postroom.ledger
   SET state = CAST(:state AS text), attempts = CAST(:attempts AS integer),
       answer = CAST(:answer AS text), error_code = CAST(:error_code AS text),
       error = CAST(:error AS text), adapter = CAST(:adapter AS text),
       updated_at = clock_timestamp(), finished_at = clock_timestamp()
 WHERE id = CAST(CAST(:id AS text) AS uuid) AND finished_at IS NULL

-- name: reopen
-- Its dead letter is sent again. What may have arrived stays unknown until somebody knows better.
UPDATE postroom.ledger
   SET state = CASE WHEN state = 'failed' THEN 'accepted' ELSE state END, finished_at = NULL,
       updated_at = clock_timestamp()
 WHERE id = CAST(CAST(:id AS text) AS uuid) AND state IN ('failed', 'unknown')

-- name: give_up
-- Its message was taken back by a person. What may have arrived has not failed.
UPDATE postroom.ledger
   SET state = CASE WHEN state = 'unknown' OR CAST(:doubtful AS integer) = 1
                    THEN 'unknown' ELSE 'failed' END,
       error_code = 'cancelled', error = CAST(:error AS text), note = CAST(:note AS text),
       updated_at = clock_timestamp(), finished_at = clock_timestamp()
 WHERE id = CAST(CAST(:id AS text) AS uuid) AND finished_at IS NULL

-- name: resolve
-- What has succeeded has no error: the last one was that nobody knew.
UPDATE postroom.ledger
   SET state = CAST(:state AS text), note = CAST(:note AS text), updated_at = clock_timestamp(),
       error_code = CASE WHEN CAST(:state AS text) = 'succeeded' THEN NULL ELSE error_code END,
       error = CASE WHEN CAST(:state AS text) = 'succeeded' THEN NULL ELSE error END
 WHERE id = CAST(CAST(:id AS text) AS uuid) AND state = 'unknown' AND finished_at IS NOT NULL

-- name: lock
-- Waits for whoever writes about this request, and keeps the next one waiting until we commit.
SELECT state FROM postroom.ledger WHERE id = CAST(CAST(:id AS text) AS uuid) FOR UPDATE

-- name: newest
SELECT CAST(id AS text), scope, key, digest, state, request, answer, attempts, error_code, error,
       adapter, note, CAST(extract(epoch FROM accepted_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM updated_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM finished_at) * 1000000 AS bigint)
  FROM postroom.ledger ORDER BY id DESC LIMIT CAST(:rows AS bigint)

-- name: newest_of
SELECT CAST(id AS text), scope, key, digest, state, request, answer, attempts, error_code, error,
       adapter, note, CAST(extract(epoch FROM accepted_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM updated_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM finished_at) * 1000000 AS bigint)
  FROM postroom.ledger WHERE state = CAST(:state AS text)
 ORDER BY id DESC LIMIT CAST(:rows AS bigint)
