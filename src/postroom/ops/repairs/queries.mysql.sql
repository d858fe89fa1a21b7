-- What MariaDB says differently.

-- name: lanes
SELECT l.lane, l.owner, w.name, l.epoch, l.paused,
       TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), l.lease_until) DIV 1000
  FROM postroom_lane l LEFT JOIN postroom_worker w ON w.incarnation = l.owner
 ORDER BY l.lane

-- name: lane_oldest
SELECT TIMESTAMPDIFF(MICROSECOND, created_at, UTC_TIMESTAMP(6)) DIV 1000
  FROM postroom_outbox WHERE lane = :lane ORDER BY position LIMIT 1

-- name: waiting
SELECT 'outbox', lane, position, topic, `key`, 0, 0
  FROM postroom_outbox WHERE id = :id
UNION ALL
SELECT 'held', lane, position, topic, `key`, attempts, blocked
  FROM postroom_held WHERE id = :id
UNION ALL
SELECT 'delayed', lane, 0, topic, `key`, 0, 0
  FROM postroom_delayed WHERE id = :id

-- name: gone
SELECT 'delivered' FROM postroom_archive WHERE id = :id
UNION ALL
SELECT state FROM postroom_dead_letter WHERE id = :id

-- name: set_aside_outbox
INSERT IGNORE INTO postroom_dead_letter (source, id, lane, position, topic, `key`, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, created_at, expires_at, state, holds_key,
       error_code, error, attempts, history, redrives, died_at, ended_at, note)
SELECT 'outbox', id, lane, position, topic, `key`, type, aggregate_type, aggregate_id, content_type,
       headers, payload, size, created_at, expires_at, 'discarded', false, 'cancelled',
       'an operator took it back', 0, '[]', redrives, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), :note
  FROM postroom_outbox WHERE lane = :lane AND position = :position

-- name: set_aside_held
INSERT IGNORE INTO postroom_dead_letter (source, id, lane, position, topic, `key`, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, created_at, expires_at, state, holds_key,
       error_code, error, attempts, history, redrives, died_at, ended_at, note)
SELECT 'outbox', id, lane, position, topic, `key`, type, aggregate_type, aggregate_id, content_type,
       headers, payload, size, created_at, expires_at, 'discarded', false, 'cancelled',
       'an operator took it back', attempts, coalesce(history, '[]'), redrives, UTC_TIMESTAMP(6),
       UTC_TIMESTAMP(6), :note
  FROM postroom_held WHERE lane = :lane AND position = :position

-- name: set_aside_delayed
INSERT IGNORE INTO postroom_dead_letter (source, id, lane, position, topic, `key`, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, created_at, expires_at, state, holds_key,
       error_code, error, attempts, history, redrives, died_at, ended_at, note)
SELECT 'outbox', id, lane, 0, topic, `key`, type, aggregate_type, aggregate_id, content_type,
       headers, payload, size, created_at, expires_at, 'discarded', false, 'cancelled',
       'an operator took it back', 0, '[]', 0, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), :note
  FROM postroom_delayed WHERE lane = :lane AND id = :id

-- name: drop_delayed
DELETE FROM postroom_delayed WHERE lane = :lane AND id = :id

-- name: keys_in_back_off
SELECT lane, topic, `key`, position, id, attempts, error_code, error,
       TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), next_attempt_at) DIV 1000
  FROM postroom_held
 WHERE lane IN (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
   AND next_attempt_at IS NOT NULL AND `key` IS NOT NULL
 ORDER BY next_attempt_at, lane, position LIMIT :rows

-- name: keys_blocked
SELECT lane, topic, `key`, position, id, attempts, error_code, error, NULL
  FROM postroom_dead_letter WHERE source = 'outbox' AND state = 'dead' AND holds_key
 ORDER BY died_at DESC, id LIMIT :rows

-- name: behind
SELECT count(*) FROM (SELECT 1 FROM postroom_held
                       WHERE lane = :lane AND topic = :topic AND `key` = :key LIMIT 1000) h

-- name: head
SELECT 'held', lane, position, topic, `key`, attempts, blocked, id
  FROM postroom_held WHERE lane = :lane AND topic = :topic AND `key` = :key
 ORDER BY position LIMIT 1

-- name: try_now
UPDATE postroom_held SET next_attempt_at = UTC_TIMESTAMP(6)
 WHERE lane = :lane AND position = :position AND NOT blocked
