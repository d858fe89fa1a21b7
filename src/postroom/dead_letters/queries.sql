-- name: where_is
-- More than one where a publisher chose the same id twice, told by its position, and where several
-- consumers could not handle a message, told by their source.
SELECT lane, position, CAST(holds_key AS int), topic, key, state, source
  FROM postroom.dead_letter
 WHERE id = CAST(CAST(:id AS text) AS uuid) AND (CAST(:source AS text) IS NULL OR source = CAST(:source AS text))
 ORDER BY source, lane, position

-- name: lock_lane
-- Waits for a settle under way, and keeps the next one waiting until we commit.
SELECT lane FROM postroom.lane WHERE lane = :lane FOR UPDATE

-- name: blocked
-- Which of these places are still held by their letters.
SELECT h.lane, h.position
  FROM unnest(CAST(CAST(:lane_list AS text) AS int[]),
              CAST(CAST(:position_list AS text) AS bigint[])) AS w(lane, position)
  JOIN postroom.held h ON h.lane = w.lane AND h.position = w.position AND h.blocked

-- name: unblock
UPDATE postroom.held
   SET blocked = false, attempts = 0, redrives = redrives + 1, expires_at = NULL,
       next_attempt_at = clock_timestamp()
 WHERE lane = :lane AND position = :position

-- name: requeue
-- It gave its place up when it died: it goes before what of its key waits or is published later.
INSERT INTO postroom.held (lane, position, id, topic, key, type, aggregate_type, aggregate_id,
       content_type, headers, payload, size, redrives, created_at, expires_at, history,
       next_attempt_at)
SELECT lane, position, id, topic, key, type, aggregate_type, aggregate_id, content_type, headers,
       payload, size, redrives + 1, created_at, NULL, history,
       CASE WHEN key IS NULL THEN clock_timestamp() END
  FROM postroom.dead_letter
 WHERE source = 'outbox' AND id = CAST(CAST(:id AS text) AS uuid) AND position = :position

-- name: queue
UPDATE postroom.dead_letter
   SET state = 'queued', redrives = redrives + 1, retried_at = clock_timestamp()
 WHERE source = :source AND id = CAST(CAST(:id AS text) AS uuid) AND position = :position

-- name: drop_held
DELETE FROM postroom.held WHERE lane = :lane AND position = :position AND blocked

-- name: discard
UPDATE postroom.dead_letter SET state = 'discarded', note = :note, ended_at = clock_timestamp()
 WHERE source = :source AND id = CAST(CAST(:id AS text) AS uuid) AND position = :position

-- name: list
-- Newest first, a page at a time: past the last one of the page before.
SELECT CAST(id AS text), topic, key, type, state, error_code, error, attempts, redrives,
       CAST(holds_key AS int), CAST(extract(epoch FROM died_at) * 1000000 AS bigint),
       source
  FROM postroom.dead_letter
 WHERE state = :state AND (CAST(:source AS text) IS NULL OR source = CAST(:source AS text))
 ORDER BY died_at DESC, id DESC LIMIT CAST(:rows AS bigint)

-- name: show
SELECT CAST(id AS text), topic, key, type, state, error_code, error, attempts, redrives,
       CAST(holds_key AS int), CAST(extract(epoch FROM died_at) * 1000000 AS bigint), source,
       aggregate_type, aggregate_id, content_type, headers, payload, history, note, lane, position,
       CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM retried_at) * 1000000 AS bigint)
  FROM postroom.dead_letter
 WHERE id = CAST(CAST(:id AS text) AS uuid) AND (CAST(:source AS text) IS NULL OR source = CAST(:source AS text))
 ORDER BY CASE state WHEN 'dead' THEN 0 WHEN 'queued' THEN 1 ELSE 2 END, source, lane, position

-- name: disarm
-- Only the head of a key has a next attempt, and there may be a new head now.
UPDATE postroom.held SET next_attempt_at = NULL
 WHERE lane = :lane AND topic = :topic AND key = :key AND next_attempt_at IS NOT NULL

-- name: arm_next
-- The next message of the key gets its turn, unless it too is a dead letter that holds the key.
UPDATE postroom.held SET next_attempt_at = clock_timestamp()
 WHERE lane = :lane AND next_attempt_at IS NULL AND NOT blocked
   AND position = (SELECT min(f.position) FROM postroom.held f
                    WHERE f.lane = :lane AND f.topic = :topic AND f.key = :key)

-- name: sources
-- Every source a dead letter can have here: the outbox, consumers that have received, and old letters.
SELECT 'outbox' AS source
UNION SELECT 'consumer:' || consumer FROM postroom.seat
UNION SELECT 'consumer:' || name FROM postroom.consumer
UNION SELECT source FROM postroom.dead_letter
 ORDER BY 1

-- name: due_by_rule
-- Oldest first. Requests of the ledger are left to operators: placing one again needs a decision.
SELECT CAST(id AS text), lane, position, CAST(holds_key AS int), topic, key, state, source,
       error_code, redrives
  FROM postroom.dead_letter
 WHERE state = 'dead' AND source = CAST(:source AS text)
   AND died_at <= clock_timestamp() - CAST(:after_us AS bigint) * interval '1 microsecond'
   AND redrives < CAST(:times AS int)
   AND strpos(CAST(:codes AS text), chr(10) || error_code || chr(10)) > 0
   AND coalesce(strpos(headers, '"postroom-ledger"'), 0) = 0
 ORDER BY died_at, position LIMIT CAST(:rows AS bigint)

-- name: pace_open
INSERT INTO postroom.redrive_pace (source, next_at) VALUES (:source, clock_timestamp())
ON CONFLICT (source) DO NOTHING

-- name: pace_lock
-- Whether more may be redriven now. A time further ahead than any redrive puts it is of a clock that
-- was set back since.
SELECT CASE WHEN next_at <= clock_timestamp()
              OR next_at > clock_timestamp() + CAST(:longest_us AS bigint) * interval '1 microsecond'
            THEN 1 ELSE 0 END
  FROM postroom.redrive_pace WHERE source = CAST(:source AS text) FOR UPDATE

-- name: pace_set
UPDATE postroom.redrive_pace
   SET next_at = clock_timestamp() + CAST(:gap_us AS bigint) * interval '1 microsecond'
 WHERE source = CAST(:source AS text)
