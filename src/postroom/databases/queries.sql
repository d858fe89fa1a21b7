-- What installing, upgrading and checking the schema asks the database.

-- name: meta_there
-- Zero before the first install; a half-done one may have left the table without a version in it.
SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = 'postroom' AND c.relname = 'meta'

-- name: schema_version
SELECT value FROM postroom.meta WHERE name = 'schema_version'

-- name: wait_for_turn
-- One installer at a time. Held until the transaction ends, so it works through a pooler too.
BEGIN;
SET LOCAL lock_timeout = '30s';
SELECT 1 FROM (SELECT pg_advisory_xact_lock(7813864120559)) AS turn;

-- name: take_turn
-- only: postgresql
-- The same in a transaction of others, whose timeouts are theirs.
SELECT 1 FROM (SELECT pg_advisory_xact_lock(7813864120559)) AS turn

-- name: wait_briefly
-- A schema change that queues behind a long transaction makes everybody queue behind it.
SET LOCAL lock_timeout = '2s'

-- name: end_turn
COMMIT

-- name: stop_publishing
-- only: postgresql
-- Nothing may be published between the look for undelivered messages and the removal.
LOCK TABLE postroom.outbox, postroom.delayed, postroom.held IN ACCESS EXCLUSIVE MODE

-- name: outbox_any
SELECT 1 FROM postroom.outbox LIMIT 1

-- name: delayed_any
SELECT 1 FROM postroom.delayed LIMIT 1

-- name: held_any
SELECT 1 FROM postroom.held LIMIT 1

-- name: dead_letter_any
SELECT 1 FROM postroom.dead_letter WHERE state IN ('dead', 'queued') LIMIT 1

-- name: inbox_any
SELECT 1 FROM postroom.inbox LIMIT 1

-- name: job_any
SELECT 1 FROM postroom.job WHERE state = 'running' LIMIT 1

-- name: functions
-- only: postgresql
SELECT p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
 WHERE n.nspname = 'postroom'

-- name: lane_count
SELECT count(*) FROM postroom.lane

-- name: writable
SELECT CASE WHEN pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on'
            THEN 0 ELSE 1 END
