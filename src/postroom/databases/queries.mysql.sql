-- name: meta_there
SELECT count(*) FROM information_schema.tables
 WHERE table_schema = DATABASE() AND table_name = 'postroom_meta'

-- name: wait_for_turn
-- One installer at a time in this database; the lock ends with the connection at the latest.
SELECT GET_LOCK(CONCAT('postroom.', LEFT(MD5(DATABASE()), 32)), 30)

-- name: wait_briefly
-- Drivers print the notes of IF EXISTS as warnings.
SET SESSION lock_wait_timeout = 5, sql_notes = 0

-- name: end_turn
SELECT RELEASE_LOCK(CONCAT('postroom.', LEFT(MD5(DATABASE()), 32)))

-- name: writable
-- A number or a word, by version; compared as text, since 'ON' counts as 0 beside a number.
SELECT CASE WHEN CONCAT(@@global.read_only) IN ('0', 'OFF') THEN 1 ELSE 0 END
