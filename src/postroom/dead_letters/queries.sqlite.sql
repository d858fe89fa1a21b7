-- What SQLite says differently. Its writers take turns, so there is no row to lock.

-- name: where_is
-- More than one where a publisher chose the same id twice, told by its position, and where several
-- consumers could not handle a message, told by their source.
SELECT lane, position, holds_key, topic, key, state, source
  FROM postroom_dead_letter
 WHERE id = :id AND (:source IS NULL OR source = :source)
 ORDER BY source, lane, position

-- name: lock_lane
SELECT lane FROM postroom_lane WHERE lane = :lane

-- name: blocked
SELECT lane, position FROM postroom_held
 WHERE lane IN (SELECT value FROM json_each(:lane_list))
   AND position IN (SELECT value FROM json_each(:position_list)) AND blocked

-- name: unblock
UPDATE postroom_held
   SET blocked = 0, attempts = 0, redrives = redrives + 1, expires_at = NULL,
       next_attempt_at = NOW_US
 WHERE lane = :lane AND position = :position

-- name: requeue
INSERT INTO postroom_held (lane, position, id, topic, key, type, aggregate_type, aggregate_id,
       content_type, headers, payload, size, redrives, created_at, expires_at, history,
       next_attempt_at)
SELECT lane, position, id, topic, key, type, aggregate_type, aggregate_id, content_type, headers,
       payload, size, redrives + 1, created_at, NULL, history,
       CASE WHEN key IS NULL THEN NOW_US END
  FROM postroom_dead_letter WHERE source = 'outbox' AND id = :id AND position = :position

-- name: queue
UPDATE postroom_dead_letter
   SET state = 'queued', redrives = redrives + 1, retried_at = NOW_US
 WHERE source = :source AND id = :id AND position = :position

-- name: discard
UPDATE postroom_dead_letter SET state = 'discarded', note = :note, ended_at = NOW_US
 WHERE source = :source AND id = :id AND position = :position

-- name: list
SELECT id, topic, key, type, state, error_code, error, attempts, redrives, holds_key, died_at,
       source
  FROM postroom_dead_letter
 WHERE state = :state AND (:source IS NULL OR source = :source)
 ORDER BY died_at DESC, id DESC LIMIT :rows

-- name: show
SELECT id, topic, key, type, state, error_code, error, attempts, redrives, holds_key, died_at,
       source,
       aggregate_type, aggregate_id, content_type, headers, payload, history, note, lane, position,
       created_at, retried_at
  FROM postroom_dead_letter
 WHERE id = :id AND (:source IS NULL OR source = :source)
 ORDER BY CASE state WHEN 'dead' THEN 0 WHEN 'queued' THEN 1 ELSE 2 END, source, lane, position

-- name: arm_next
-- The next message of the key gets its turn, unless it too is a dead letter that holds the key.
UPDATE postroom_held SET next_attempt_at = NOW_US
 WHERE lane = :lane AND next_attempt_at IS NULL AND NOT blocked
   AND position = (SELECT min(f.position) FROM postroom_held f
                    WHERE f.lane = :lane AND f.topic = :topic AND f.key = :key)

-- name: sources
SELECT 'outbox' AS source
UNION SELECT 'consumer:' || consumer FROM postroom_seat
UNION SELECT 'consumer:' || name FROM postroom_consumer
UNION SELECT source FROM postroom_dead_letter
 ORDER BY 1

-- name: due_by_rule
SELECT id, lane, position, holds_key, topic, key, state, source, error_code, redrives
  FROM postroom_dead_letter
 WHERE state = 'dead' AND source = :source
   AND died_at <= NOW_US - :after_us
   AND redrives < :times
   AND instr(:codes, char(10) || error_code || char(10)) > 0
   AND coalesce(instr(headers, '"postroom-ledger"'), 0) = 0
 ORDER BY died_at, position LIMIT :rows

-- name: pace_open
INSERT INTO postroom_redrive_pace (source, next_at) VALUES (:source, NOW_US)
ON CONFLICT (source) DO NOTHING

-- name: pace_lock
SELECT CASE WHEN next_at <= NOW_US OR next_at > NOW_US + :longest_us THEN 1 ELSE 0 END
  FROM postroom_redrive_pace WHERE source = :source

-- name: pace_set
UPDATE postroom_redrive_pace SET next_at = NOW_US + :gap_us WHERE source = :source
