-- What MariaDB says differently.

-- name: where_is
-- More than one where a publisher chose the same id twice, told by its position, and where several
-- consumers could not handle a message, told by their source.
SELECT lane, position, holds_key, topic, `key`, state, source
  FROM postroom_dead_letter
 WHERE id = :id AND (:source IS NULL OR source = :source)
 ORDER BY source, lane, position

-- name: blocked
SELECT lane, position FROM postroom_held
 WHERE lane IN :lane_list AND position IN :position_list AND blocked

-- name: unblock
UPDATE postroom_held
   SET blocked = FALSE, attempts = 0, redrives = redrives + 1, expires_at = NULL,
       next_attempt_at = UTC_TIMESTAMP(6)
 WHERE lane = :lane AND position = :position

-- name: requeue
INSERT INTO postroom_held (lane, position, id, topic, `key`, type, aggregate_type, aggregate_id,
       content_type, headers, payload, size, redrives, created_at, expires_at, history,
       next_attempt_at)
SELECT lane, position, id, topic, `key`, type, aggregate_type, aggregate_id, content_type, headers,
       payload, size, redrives + 1, created_at, NULL, history,
       CASE WHEN `key` IS NULL THEN UTC_TIMESTAMP(6) END
  FROM postroom_dead_letter WHERE source = 'outbox' AND id = :id AND position = :position

-- name: queue
UPDATE postroom_dead_letter
   SET state = 'queued', redrives = redrives + 1, retried_at = UTC_TIMESTAMP(6)
 WHERE source = :source AND id = :id AND position = :position

-- name: discard
UPDATE postroom_dead_letter SET state = 'discarded', note = :note, ended_at = UTC_TIMESTAMP(6)
 WHERE source = :source AND id = :id AND position = :position

-- name: list
SELECT id, topic, `key`, type, state, error_code, error, attempts, redrives, holds_key,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', died_at), source
  FROM postroom_dead_letter
 WHERE state = :state AND (:source IS NULL OR source = :source)
 ORDER BY died_at DESC, id DESC LIMIT :rows

-- name: show
SELECT id, topic, `key`, type, state, error_code, error, attempts, redrives, holds_key,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', died_at), source,
       aggregate_type, aggregate_id, content_type, headers, payload, history, note, lane, position,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', retried_at)
  FROM postroom_dead_letter
 WHERE id = :id AND (:source IS NULL OR source = :source)
 ORDER BY CASE state WHEN 'dead' THEN 0 WHEN 'queued' THEN 1 ELSE 2 END, source, lane, position

-- name: disarm
UPDATE postroom_held SET next_attempt_at = NULL
 WHERE lane = :lane AND topic = :topic AND `key` = :key AND next_attempt_at IS NOT NULL

-- name: arm_next
-- The next message of the key gets its turn, unless it too is a dead letter that holds the key.
UPDATE postroom_held SET next_attempt_at = UTC_TIMESTAMP(6)
 WHERE lane = :lane AND next_attempt_at IS NULL AND NOT blocked
   AND position = (SELECT min(f.position) FROM postroom_held f
                    WHERE f.lane = :lane AND f.topic = :topic AND f.`key` = :key)

-- name: sources
SELECT 'outbox' AS source
UNION SELECT CONCAT('consumer:', consumer) FROM postroom_seat
UNION SELECT CONCAT('consumer:', name) FROM postroom_consumer
UNION SELECT source FROM postroom_dead_letter
 ORDER BY 1

-- name: due_by_rule
SELECT id, lane, position, holds_key, topic, `key`, state, source, error_code, redrives
  FROM postroom_dead_letter
 WHERE state = 'dead' AND source = :source
   AND died_at <= UTC_TIMESTAMP(6) - INTERVAL :after_us MICROSECOND
   AND redrives < :times
   AND locate(concat(char(10), error_code, char(10)), :codes) > 0
   AND coalesce(locate('"postroom-ledger"', headers), 0) = 0
 ORDER BY died_at, position LIMIT :rows

-- name: pace_open
-- Not INSERT IGNORE, which takes a shared lock on a known row: two workers would deadlock on it.
INSERT INTO postroom_redrive_pace (source, next_at) VALUES (:source, UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE next_at = next_at

-- name: pace_lock
SELECT CASE WHEN next_at <= UTC_TIMESTAMP(6)
              OR next_at > UTC_TIMESTAMP(6) + INTERVAL :longest_us MICROSECOND
            THEN 1 ELSE 0 END
  FROM postroom_redrive_pace WHERE source = :source FOR UPDATE

-- name: pace_set
UPDATE postroom_redrive_pace SET next_at = UTC_TIMESTAMP(6) + INTERVAL :gap_us MICROSECOND
 WHERE source = :source
