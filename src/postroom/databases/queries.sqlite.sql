-- name: meta_there
SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'postroom_meta'

-- name: wait_for_turn
-- One installer at a time: the only writer there can be.
PRAGMA busy_timeout = 30000;
BEGIN IMMEDIATE;

-- name: wait_briefly
SELECT 1

-- name: end_turn
COMMIT

-- name: writable
SELECT 1
