-- What SQLite says differently.

-- name: outbox_page
SELECT 'pending', lane, position, id, topic, key, type, aggregate_type, aggregate_id,
       size, 0, NULL, created_at, NULL,
       CASE WHEN :payloads = 1 THEN payload END
  FROM postroom_outbox WHERE lane = :lane AND position > :after
 ORDER BY position LIMIT :rows

-- name: held_page
SELECT CASE WHEN blocked THEN 'dead' ELSE 'held' END, lane, position, id, topic, key,
       type, aggregate_type, aggregate_id, size, attempts, error_code,
       created_at,
       next_attempt_at,
       CASE WHEN :payloads = 1 THEN payload END
  FROM postroom_held WHERE lane = :lane AND position > :after
 ORDER BY position LIMIT :rows

-- name: delayed_page
SELECT 'delayed', lane, deliver_at, id,
       topic, key, type, aggregate_type, aggregate_id, size, 0, NULL,
       created_at,
       deliver_at,
       CASE WHEN :payloads = 1 THEN payload END
  FROM postroom_delayed WHERE lane = :lane
 ORDER BY deliver_at, id LIMIT :rows

-- name: archive_page
SELECT 'delivered', lane, position, id, topic, key, type, aggregate_type,
       aggregate_id, size, attempts, NULL,
       created_at,
       delivered_at,
       CASE WHEN :payloads = 1 THEN payload END
  FROM postroom_archive WHERE id > :after_id
 ORDER BY id, day LIMIT :rows

-- name: dead_letter_page
SELECT CASE WHEN state = 'resolved' AND error_code = 'expired' THEN 'expired' ELSE state END,
       lane, position, id, topic, key, type, aggregate_type, aggregate_id,
       size, attempts, error_code, created_at,
       died_at,
       CASE WHEN :payloads = 1 THEN payload END
  FROM postroom_dead_letter
 WHERE source = 'outbox' AND id > :after_id
 ORDER BY source, id, position LIMIT :rows

-- name: batches
SELECT b.lane, b.lo, b.hi FROM postroom_lane_batch b
  JOIN postroom_lane l ON l.lane = b.lane AND l.owner = b.incarnation
