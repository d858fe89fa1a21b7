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

-- name: inbox_held_any
SELECT 1 FROM postroom.inbox_held LIMIT 1

-- name: idempotency_key_any
SELECT 1 FROM postroom.idempotency_key LIMIT 1

-- name: ledger_any
SELECT 1 FROM postroom.ledger LIMIT 1

-- name: functions
-- only: postgresql
SELECT p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
 WHERE n.nspname = 'postroom'

-- name: caches
-- only: postgresql
-- Tables whose positions are handed out in advance: a session that has some left gives a later
-- message a lower one.
SELECT CAST(CAST(d.refobjid AS regclass) AS text), q.seqcache
  FROM pg_sequence q
  JOIN pg_depend d ON d.objid = q.seqrelid AND d.refobjsubid > 0
                  AND d.classid = CAST('pg_class' AS regclass)
 WHERE d.refobjid = ANY(ARRAY[to_regclass('postroom.outbox'), to_regclass('postroom.inbox_held')])
   AND q.seqcache <> 1
 ORDER BY 1

-- name: lane_count
SELECT count(*) FROM postroom.lane

-- name: writable
SELECT CASE WHEN pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on'
            THEN 0 ELSE 1 END

-- name: introduce
-- only: postgresql
-- Who answers, whether it takes writes, and when it started. Text, since a COPY carries it too.
SELECT pg_backend_pid(),
       CASE WHEN pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on'
            THEN 1 ELSE 0 END,
       CAST(extract(epoch FROM pg_postmaster_start_time()) * 1000000 AS bigint)

-- name: backend
-- only: postgresql
SELECT pg_backend_pid()

-- name: begin_pooled
-- only: postgresql
-- Behind a pooler every transaction brings its own settings and leaves none behind. One text, so
-- one journey; its two numbers are written in, since such a text takes no parameters. A pooler may
-- go over to another server without a word, and what we remember is then worth nothing: the last
-- line refuses to go on.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL idle_in_transaction_session_timeout = {idle_ms};
SET LOCAL jit = off;
SET LOCAL enable_seqscan = off;
SET LOCAL enable_bitmapscan = off;
SELECT CAST(CASE WHEN CAST(extract(epoch FROM pg_postmaster_start_time()) * 1000000 AS bigint)
                      = {server}
                 THEN '1' ELSE 'another server behind the pooler' END AS int);
