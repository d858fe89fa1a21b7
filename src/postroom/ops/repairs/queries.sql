-- What an operator mends: lanes, held keys, and messages that are still waiting. Whoever changes
-- what a relay may have in memory takes its lane away (yield_lane): the relay then finds its fence
-- gone before it sends, drops what it had read, and takes the lane again.

-- name: lanes
SELECT l.lane, l.owner, w.name, l.epoch, CAST(l.paused AS int),
       CAST(extract(epoch FROM l.lease_until - clock_timestamp()) * 1000 AS bigint)
  FROM postroom.lane l LEFT JOIN postroom.worker w ON w.incarnation = l.owner
 ORDER BY l.lane

-- name: lane_depth
-- Counts stop at a thousand: a look must not cost more as the outbox grows.
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom.outbox WHERE lane = :lane LIMIT 1000) o),
       (SELECT count(*) FROM (SELECT 1 FROM postroom.held WHERE lane = :lane LIMIT 1000) h)

-- name: lane_oldest
SELECT CAST(extract(epoch FROM clock_timestamp() - created_at) * 1000 AS bigint)
  FROM postroom.outbox WHERE lane = :lane ORDER BY position LIMIT 1

-- name: lane_sending
-- How many batches the owner of the lane is sending right now.
SELECT count(*) FROM postroom.lane_batch b
  JOIN postroom.lane l ON l.lane = b.lane AND l.owner = b.incarnation
 WHERE b.lane = :lane

-- name: lane_now
SELECT owner, CASE WHEN paused THEN 1 ELSE 0 END FROM postroom.lane WHERE lane = :lane

-- name: pause_lane
UPDATE postroom.lane SET paused = true WHERE lane = :lane

-- name: resume_lane
UPDATE postroom.lane SET paused = false WHERE lane = :lane

-- name: yield_lane
UPDATE postroom.lane SET owner = NULL, lease_until = NULL, epoch = epoch + 1
 WHERE lane = :lane AND owner IS NOT NULL

-- name: waiting
-- In one statement, so that a message on its way from one table to another is not missed.
SELECT 'outbox', lane, position, topic, key, 0, 0
  FROM postroom.outbox WHERE id = CAST(CAST(:id AS text) AS uuid)
UNION ALL
SELECT 'held', lane, position, topic, key, attempts, CAST(blocked AS int)
  FROM postroom.held WHERE id = CAST(CAST(:id AS text) AS uuid)
UNION ALL
SELECT 'delayed', lane, 0, topic, key, 0, 0
  FROM postroom.delayed WHERE id = CAST(CAST(:id AS text) AS uuid)

-- name: gone
-- What became of a message that does not wait any more.
SELECT 'delivered' FROM postroom.archive WHERE id = CAST(CAST(:id AS text) AS uuid)
UNION ALL
SELECT state FROM postroom.dead_letter WHERE id = CAST(CAST(:id AS text) AS uuid)

-- name: under_way
-- The batches that hold this position: 1 if their relay is at work on them, 0 if it is gone.
SELECT CASE WHEN l.owner = b.incarnation THEN 1 ELSE 0 END
  FROM postroom.lane_batch b JOIN postroom.lane l ON l.lane = b.lane
 WHERE b.lane = :lane AND b.held = (:held = 1) AND :position BETWEEN b.lo AND b.hi

-- name: set_aside_outbox
INSERT INTO postroom.dead_letter (source, id, lane, position, topic, key, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, created_at, expires_at, state, holds_key,
       error_code, error, attempts, history, redrives, died_at, ended_at, note)
SELECT 'outbox', id, lane, position, topic, key, type, aggregate_type, aggregate_id, content_type,
       headers, payload, size, created_at, expires_at, 'discarded', false, 'cancelled',
       'an operator took it back', 0, '[]', redrives, clock_timestamp(), clock_timestamp(), :note
  FROM postroom.outbox WHERE lane = :lane AND position = :position
ON CONFLICT DO NOTHING

-- name: set_aside_held
-- A redriven one has its letter already, which is discarded beside this.
INSERT INTO postroom.dead_letter (source, id, lane, position, topic, key, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, created_at, expires_at, state, holds_key,
       error_code, error, attempts, history, redrives, died_at, ended_at, note)
SELECT 'outbox', id, lane, position, topic, key, type, aggregate_type, aggregate_id, content_type,
       headers, payload, size, created_at, expires_at, 'discarded', false, 'cancelled',
       'an operator took it back', attempts, coalesce(history, '[]'), redrives, clock_timestamp(),
       clock_timestamp(), :note
  FROM postroom.held WHERE lane = :lane AND position = :position
ON CONFLICT DO NOTHING

-- name: set_aside_delayed
INSERT INTO postroom.dead_letter (source, id, lane, position, topic, key, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, created_at, expires_at, state, holds_key,
       error_code, error, attempts, history, redrives, died_at, ended_at, note)
SELECT 'outbox', id, lane, 0, topic, key, type, aggregate_type, aggregate_id, content_type,
       headers, payload, size, created_at, expires_at, 'discarded', false, 'cancelled',
       'an operator took it back', 0, '[]', 0, clock_timestamp(), clock_timestamp(), :note
  FROM postroom.delayed WHERE lane = :lane AND id = CAST(CAST(:id AS text) AS uuid)
ON CONFLICT DO NOTHING

-- name: drop_outbox
DELETE FROM postroom.outbox WHERE lane = :lane AND position = :position

-- name: drop_held
DELETE FROM postroom.held WHERE lane = :lane AND position = :position

-- name: drop_delayed
DELETE FROM postroom.delayed WHERE lane = :lane AND id = CAST(CAST(:id AS text) AS uuid)

-- name: keys_in_back_off
-- The heads of held keys that will be tried again, soonest first.
SELECT lane, topic, key, position, CAST(id AS text), attempts, error_code, error,
       CAST(extract(epoch FROM next_attempt_at - clock_timestamp()) * 1000 AS bigint)
  FROM postroom.held WHERE next_attempt_at IS NOT NULL AND key IS NOT NULL
 ORDER BY next_attempt_at, lane, position LIMIT CAST(:rows AS bigint)

-- name: keys_blocked
-- The dead letters that hold their keys, newest first.
SELECT lane, topic, key, position, CAST(id AS text), attempts, error_code, error, NULL
  FROM postroom.dead_letter WHERE source = 'outbox' AND state = 'dead' AND holds_key
 ORDER BY died_at DESC, id LIMIT CAST(:rows AS bigint)

-- name: behind
-- How many messages of a key wait; counting stops at a thousand.
SELECT count(*) FROM (SELECT 1 FROM postroom.held
                       WHERE lane = :lane AND topic = :topic AND key = :key LIMIT 1000) h

-- name: head
SELECT 'held', lane, position, topic, key, attempts, CAST(blocked AS int), CAST(id AS text)
  FROM postroom.held WHERE lane = :lane AND topic = :topic AND key = :key
 ORDER BY position LIMIT 1

-- name: try_now
UPDATE postroom.held SET next_attempt_at = clock_timestamp()
 WHERE lane = :lane AND position = :position AND NOT blocked
