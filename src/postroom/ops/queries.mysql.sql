-- What MariaDB says differently.

-- name: depth
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom_outbox LIMIT :most) o),
       (SELECT count(*) FROM (SELECT 1 FROM postroom_held LIMIT :most) h),
       (SELECT count(*) FROM (SELECT 1 FROM postroom_delayed LIMIT :most) d),
       (SELECT count(*) FROM (SELECT 1 FROM postroom_dead_letter WHERE state = 'dead'
                               LIMIT :most) b)

-- name: lanes
SELECT l.lane, l.owner, w.name, l.epoch, l.paused,
       TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), l.lease_until) DIV 1000
  FROM postroom_lane l LEFT JOIN postroom_worker w ON w.incarnation = l.owner
 ORDER BY l.lane

-- name: find
-- In one statement, so that a message on its way from one table to another is not missed.
SELECT 'outbox', lane, position, topic, `key`, type, aggregate_type, aggregate_id, content_type,
       headers, payload, redrives, 0, NULL, NULL,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at), NULL, NULL
  FROM postroom_outbox WHERE id = :id
UNION ALL
SELECT 'delayed', lane, 0, topic, `key`, type, aggregate_type, aggregate_id, content_type, headers,
       payload, 0, 0, NULL, NULL, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', deliver_at), NULL
  FROM postroom_delayed WHERE id = :id
UNION ALL
SELECT CASE WHEN blocked THEN 'blocked' ELSE 'held' END, lane, position, topic, `key`, type,
       aggregate_type, aggregate_id, content_type, headers, payload, redrives, attempts, error_code,
       error, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', next_attempt_at), history
  FROM postroom_held WHERE id = :id
UNION ALL
SELECT 'archive', lane, position, topic, `key`, type, aggregate_type, aggregate_id, content_type,
       headers, payload, redrives, attempts, NULL, NULL,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', delivered_at), NULL
  FROM postroom_archive WHERE id = :id
UNION ALL
SELECT state, lane, position, topic, `key`, type, aggregate_type, aggregate_id, content_type, headers,
       payload, redrives, attempts, error_code, error,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', died_at), history
  FROM postroom_dead_letter WHERE source = 'outbox' AND id = :id

-- name: sending
-- Whether the relay that owns the lane has said that it is sending this position.
SELECT 1 FROM postroom_lane_batch b
  JOIN postroom_lane l ON l.lane = b.lane AND l.owner = b.incarnation
 WHERE b.lane = :lane AND :position BETWEEN b.lo AND b.hi
 LIMIT 1
