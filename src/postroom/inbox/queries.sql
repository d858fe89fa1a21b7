-- What consumers have handled, what waits to be handled again, and whose turn it is to receive.

-- name: insert
-- Waits for whoever is inserting the same row: they commit, and we are a duplicate, or they do not.
INSERT INTO postroom.inbox (consumer, message_id, digest) VALUES (:consumer, :message_id, :digest)
ON CONFLICT DO NOTHING RETURNING 1

-- name: digest
SELECT digest FROM postroom.inbox WHERE consumer = :consumer AND message_id = :message_id

-- name: seat_take
-- Waits for the transaction under way of whoever had it.
INSERT INTO postroom.seat (consumer, source, owner, epoch)
VALUES (CAST(:consumer AS text), CAST(:source AS text), CAST(:owner AS text), 1)
ON CONFLICT (consumer, source) DO UPDATE
   SET owner = excluded.owner, epoch = seat.epoch + 1, taken_at = clock_timestamp()
RETURNING epoch

-- name: begin
-- On a connection that is not ours: each statement must see what others have committed before it.
SET TRANSACTION ISOLATION LEVEL READ COMMITTED

-- name: enter
-- The first statement of a handler's transaction: which of these seats are still ours. The share lock
-- keeps a take-over waiting until we commit; the timeout ends the transaction of a frozen process.
WITH patience AS MATERIALIZED (
    SELECT set_config('idle_in_transaction_session_timeout', CAST(:stuck_ms AS text), true)),
mine AS MATERIALIZED (
    SELECT s.source, s.epoch FROM postroom.seat s
      JOIN jsonb_to_recordset(CAST(CAST(:seats AS text) AS jsonb)) AS w(source text, epoch bigint)
        ON s.source = w.source AND s.epoch = w.epoch
     WHERE s.consumer = CAST(:consumer AS text) AND s.owner = CAST(:owner AS text)
     ORDER BY s.source FOR SHARE OF s)
SELECT m.source, m.epoch FROM patience LEFT JOIN mine m ON true

-- name: claim
-- Insert first, many at once, in one order for everybody so that two batches never deadlock. Returns
-- those that were not there.
INSERT INTO postroom.inbox (consumer, message_id, digest)
SELECT CAST(:consumer AS text), w.id, w.digest
  FROM jsonb_to_recordset(CAST(CAST(:entries AS text) AS jsonb)) AS w(id text, digest text)
 ORDER BY w.id
ON CONFLICT DO NOTHING RETURNING message_id

-- name: known
SELECT i.message_id, i.digest
  FROM jsonb_to_recordset(CAST(CAST(:entries AS text) AS jsonb)) AS w(id text)
  JOIN postroom.inbox i ON i.consumer = CAST(:consumer AS text) AND i.message_id = w.id

-- name: held_keys
-- Which of these keys have something that their later messages must not pass.
SELECT w.topic, w.key
  FROM jsonb_to_recordset(CAST(CAST(:keys AS text) AS jsonb)) AS w(topic text, key text)
 WHERE EXISTS (SELECT 1 FROM postroom.inbox_held h
                WHERE h.consumer = CAST(:consumer AS text) AND h.topic = w.topic AND h.key = w.key
                  AND NOT h.aside)

-- name: held_tail
-- The last of a key, locked: if it is being handled right now we wait, and look again.
SELECT position FROM postroom.inbox_held
 WHERE consumer = :consumer AND topic = :topic AND key = :key AND NOT aside
 ORDER BY position DESC LIMIT 1 FOR SHARE

-- name: park
INSERT INTO postroom.inbox_held (consumer, message_id, topic, key, type, content_type, headers,
       payload, size, attempts, history, error_code, error, next_attempt_at)
VALUES (CAST(:consumer AS text), CAST(:message_id AS text), CAST(:topic AS text),
        CAST(:key AS text), CAST(:type AS text), CAST(:content_type AS text),
        CAST(:headers AS text), CAST(:payload AS bytea), CAST(:size AS integer),
        CAST(:attempts AS integer), CAST(:history AS text), CAST(:error_code AS text),
        CAST(:error AS text),
        clock_timestamp() + CAST(:delay_us AS bigint) * interval '1 microsecond')

-- name: where_parked
SELECT position FROM postroom.inbox_held
 WHERE consumer = :consumer AND message_id = :message_id

-- name: due_any
-- Asked first, without a lock: most of the time there is nothing.
SELECT 1 FROM postroom.inbox_held
 WHERE consumer = :consumer AND next_attempt_at <= statement_timestamp() LIMIT 1

-- name: due
-- Heads whose time has come and that nobody is at. statement_timestamp, since an index cannot be asked
-- for clock_timestamp, which changes from row to row.
SELECT position, message_id, topic, key, type, content_type, headers, payload, attempts, history,
       redrives
  FROM postroom.inbox_held
 WHERE consumer = :consumer AND next_attempt_at <= statement_timestamp()
 ORDER BY next_attempt_at, position LIMIT CAST(:rows AS bigint) FOR UPDATE SKIP LOCKED

-- name: lease
-- They are about to be tried here: nobody else looks at them for a while.
UPDATE postroom.inbox_held
   SET next_attempt_at = clock_timestamp() + CAST(:pause_us AS bigint) * interval '1 microsecond',
       lease_us = CAST(:pause_us AS bigint)
 WHERE consumer = :consumer AND position = ANY(CAST(CAST(:positions AS text) AS bigint[]))

-- name: lease_cap
-- A lease that ends later than it could have been written: the database's clock went back. It ends one
-- lease from now. Retries that wait for their time have no length here.
UPDATE postroom.inbox_held
   SET next_attempt_at = clock_timestamp() + lease_us * interval '1 microsecond'
 WHERE consumer = :consumer AND next_attempt_at > statement_timestamp()
   AND next_attempt_at > clock_timestamp() + lease_us * interval '1 microsecond'

-- name: start
-- Counted before the handler runs, so that a message that ends the process is not tried for ever.
UPDATE postroom.inbox_held
   SET attempts = attempts + 1,
       next_attempt_at = clock_timestamp() + CAST(:pause_us AS bigint) * interval '1 microsecond',
       lease_us = CAST(:pause_us AS bigint)
 WHERE consumer = :consumer AND position = :position

-- name: unlease
-- They were not tried here after all.
UPDATE postroom.inbox_held SET next_attempt_at = clock_timestamp()
 WHERE consumer = :consumer AND position = :position AND attempts = :attempts AND NOT blocked
   AND next_attempt_at IS NOT NULL

-- name: lock_parked
-- Ours alone until we commit; gone, or with another number of attempts, it is somebody else's.
SELECT position FROM postroom.inbox_held
 WHERE consumer = :consumer AND position = :position AND attempts = :attempts AND NOT blocked
   FOR UPDATE

-- name: behind
-- What waits behind a head that was handled, oldest first, up to the next dead letter.
SELECT position, message_id, topic, key, type, content_type, headers, payload, attempts, history,
       redrives
  FROM postroom.inbox_held
 WHERE consumer = :consumer AND topic = :topic AND key = :key AND NOT aside
   AND position < coalesce((SELECT min(b.position) FROM postroom.inbox_held b
                             WHERE b.consumer = :consumer AND b.topic = :topic AND b.key = :key
                               AND b.blocked AND NOT b.aside), 9223372036854775807)
 ORDER BY position LIMIT CAST(:rows AS bigint) FOR UPDATE

-- name: drop_parked
DELETE FROM postroom.inbox_held
 WHERE consumer = :consumer AND position = ANY(CAST(CAST(:positions AS text) AS bigint[]))

-- name: handled
-- It is remembered from now on, not from when it failed first.
INSERT INTO postroom.inbox (consumer, message_id)
VALUES (CAST(:consumer AS text), CAST(:message_id AS text))
ON CONFLICT (consumer, message_id) DO UPDATE SET handled_at = clock_timestamp()

-- name: head
SELECT position FROM postroom.inbox_held
 WHERE consumer = :consumer AND topic = :topic AND key = :key AND NOT aside
 ORDER BY position LIMIT 1

-- name: arm
-- The first of a key gets its turn, unless it has it or is a dead letter that holds the key.
UPDATE postroom.inbox_held SET next_attempt_at = clock_timestamp()
 WHERE consumer = :consumer AND position = :position AND next_attempt_at IS NULL AND NOT blocked

-- name: disarm
-- Only the head of a key has a next attempt, and there may be a new head now.
UPDATE postroom.inbox_held SET next_attempt_at = NULL
 WHERE consumer = :consumer AND topic = :topic AND key = :key AND next_attempt_at IS NOT NULL

-- name: fail_parked
UPDATE postroom.inbox_held
   SET attempts = :attempts, history = :history, error_code = :error_code, error = :error,
       next_attempt_at = clock_timestamp() + CAST(:delay_us AS bigint) * interval '1 microsecond',
       lease_us = NULL
 WHERE consumer = :consumer AND position = :position

-- name: bury
-- A redriven message that dies again updates its letter: it kept its position.
INSERT INTO postroom.dead_letter (source, id, lane, position, topic, key, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, created_at, state, holds_key,
       error_code, error, attempts, history, redrives, died_at)
SELECT CAST(:source AS text), CAST(CAST(:id AS text) AS uuid), CAST(:lane AS smallint), h.position,
       h.topic, h.key, h.type, CAST(:aggregate_type AS text), CAST(:aggregate_id AS text),
       h.content_type, h.headers, h.payload, h.size, h.held_at, 'dead',
       CAST(:holds_key AS int) = 1, CAST(:error_code AS text), CAST(:error AS text),
       CAST(:attempts AS int), CAST(:history AS text), h.redrives, clock_timestamp()
  FROM postroom.inbox_held h
 WHERE h.consumer = CAST(:consumer AS text) AND h.position = CAST(:position AS bigint)
ON CONFLICT (source, id, position) DO UPDATE
   SET state = excluded.state, holds_key = excluded.holds_key, error_code = excluded.error_code,
       error = excluded.error, attempts = excluded.attempts, history = excluded.history,
       redrives = excluded.redrives, died_at = excluded.died_at

-- name: block
-- The row stays while a person has to decide; set aside, it holds nothing of its key back.
UPDATE postroom.inbox_held
   SET blocked = true, aside = CAST(:aside AS int) = 1, next_attempt_at = NULL,
       attempts = :attempts, history = :history, error_code = :error_code, error = :error
 WHERE consumer = :consumer AND position = :position

-- name: resolve
UPDATE postroom.dead_letter SET state = 'resolved', ended_at = clock_timestamp()
 WHERE source = :source AND id = CAST(CAST(:id AS text) AS uuid) AND position = :position
   AND state = 'queued'

-- name: lock_key
-- All of a key that waits, so that nobody joins it or leaves it meanwhile.
SELECT position, CAST(blocked AS int), CAST(aside AS int) FROM postroom.inbox_held
 WHERE consumer = :consumer AND topic = :topic AND key = :key ORDER BY position FOR UPDATE

-- name: lock_one
SELECT position, CAST(blocked AS int), CAST(aside AS int) FROM postroom.inbox_held
 WHERE consumer = :consumer AND position = :position FOR UPDATE

-- name: unblock
UPDATE postroom.inbox_held
   SET blocked = false, aside = false, attempts = 0, redrives = redrives + 1,
       next_attempt_at = CASE WHEN key IS NULL THEN clock_timestamp() END
 WHERE consumer = :consumer AND position = :position AND blocked

-- name: meta
SELECT value FROM postroom.meta WHERE name = :item

-- name: beat
-- Needs no durable commit: the next beat comes in a second.
WITH quick AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
INSERT INTO postroom.worker (incarnation, kind, name, report)
SELECT CAST(:incarnation AS text), 'consumer', CAST(:worker_name AS text), CAST(:report AS text)
  FROM quick
ON CONFLICT (incarnation) DO UPDATE SET seen_at = clock_timestamp(), report = excluded.report

-- name: register
-- When a process begins and ends: the consumer is known though no process of it is alive.
INSERT INTO postroom.consumer (name, broker, topics)
VALUES (CAST(:consumer AS text), CAST(:broker AS text), CAST(:topics AS text))
ON CONFLICT (name) DO UPDATE
   SET broker = excluded.broker, topics = excluded.topics, seen_at = clock_timestamp()

-- name: silent
-- Reports of consumer processes that ended without stopping, not long ago.
SELECT report FROM postroom.worker
 WHERE kind = 'consumer' AND seen_at BETWEEN clock_timestamp() - interval '600 seconds'
                                         AND clock_timestamp() - interval '15 seconds'
 LIMIT 1000

-- name: at_work
SELECT 1 FROM postroom.worker WHERE incarnation = :incarnation

-- name: gone
DELETE FROM postroom.worker WHERE incarnation = :incarnation

-- name: measure
-- Counts stop at a limit, so that a look costs the same at any size.
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom.inbox_held h
                               WHERE h.consumer = :consumer LIMIT CAST(:most AS bigint)) n),
       (SELECT count(*) FROM (SELECT 1 FROM postroom.inbox_held h
                               WHERE h.consumer = :consumer AND h.blocked
                               LIMIT CAST(:most AS bigint)) n),
       (SELECT CAST(extract(epoch FROM clock_timestamp() - h.held_at) * 1000 AS bigint)
          FROM postroom.inbox_held h WHERE h.consumer = :consumer AND NOT h.blocked
         ORDER BY h.position LIMIT 1),
       (SELECT count(DISTINCT (n.topic, n.key))
          FROM (SELECT h.topic, h.key FROM postroom.inbox_held h
                 WHERE h.consumer = :consumer AND h.key IS NOT NULL AND NOT h.aside
                 LIMIT CAST(:most AS bigint)) n),
       (SELECT count(DISTINCT (n.topic, n.key))
          FROM (SELECT h.topic, h.key FROM postroom.inbox_held h
                 WHERE h.consumer = :consumer AND h.key IS NOT NULL AND NOT h.aside AND h.blocked
                 LIMIT CAST(:most AS bigint)) n)
