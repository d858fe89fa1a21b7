-- What an operator looks at. Counts stop at a limit: a look must not cost more as the outbox grows.

-- name: depth
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom.outbox LIMIT CAST(:most AS bigint)) o),
       (SELECT count(*) FROM (SELECT 1 FROM postroom.held LIMIT CAST(:most AS bigint)) h),
       (SELECT count(*) FROM (SELECT 1 FROM postroom.delayed LIMIT CAST(:most AS bigint)) d),
       (SELECT count(*) FROM (SELECT 1 FROM postroom.dead_letter WHERE state = 'dead'
                               LIMIT CAST(:most AS bigint)) b)

-- name: lanes
SELECT l.lane, l.owner, w.name, l.epoch, CAST(l.paused AS int),
       CAST(extract(epoch FROM l.lease_until - clock_timestamp()) * 1000 AS bigint)
  FROM postroom.lane l LEFT JOIN postroom.worker w ON w.incarnation = l.owner
 ORDER BY l.lane

-- name: meta
SELECT name, value FROM postroom.meta ORDER BY name

-- name: find
-- In one statement, so that a message on its way from one table to another is not missed.
SELECT 'outbox', lane, position, topic, key, type, aggregate_type, aggregate_id, content_type,
       headers, payload, redrives, 0, NULL, NULL,
       CAST(extract(epoch FROM created_at) * 1000000 AS bigint), CAST(NULL AS bigint), NULL
  FROM postroom.outbox WHERE id = CAST(CAST(:id AS text) AS uuid)
UNION ALL
SELECT 'delayed', lane, 0, topic, key, type, aggregate_type, aggregate_id, content_type, headers,
       payload, 0, 0, NULL, NULL, CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM deliver_at) * 1000000 AS bigint), NULL
  FROM postroom.delayed WHERE id = CAST(CAST(:id AS text) AS uuid)
UNION ALL
SELECT CASE WHEN blocked THEN 'blocked' ELSE 'held' END, lane, position, topic, key, type,
       aggregate_type, aggregate_id, content_type, headers, payload, redrives, attempts, error_code,
       error, CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM next_attempt_at) * 1000000 AS bigint), history
  FROM postroom.held WHERE id = CAST(CAST(:id AS text) AS uuid)
UNION ALL
SELECT 'archive', lane, position, topic, key, type, aggregate_type, aggregate_id, content_type,
       headers, payload, redrives, attempts, NULL, NULL,
       CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM delivered_at) * 1000000 AS bigint), NULL
  FROM postroom.archive WHERE id = CAST(CAST(:id AS text) AS uuid)
UNION ALL
SELECT state, lane, position, topic, key, type, aggregate_type, aggregate_id, content_type, headers,
       payload, redrives, attempts, error_code, error,
       CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM died_at) * 1000000 AS bigint), history
  FROM postroom.dead_letter
 WHERE source = 'outbox' AND id = CAST(CAST(:id AS text) AS uuid)

-- name: sending
-- Whether the relay that owns the lane has said that it is sending this position.
SELECT 1 FROM postroom.lane_batch b
  JOIN postroom.lane l ON l.lane = b.lane AND l.owner = b.incarnation
 WHERE b.lane = :lane AND CAST(:position AS bigint) BETWEEN b.lo AND b.hi
 LIMIT 1

-- name: archive_end
-- only: postgresql
-- How many blocks the longest day of the archive has.
SELECT CAST(coalesce(max(pg_relation_size(CAST(i.inhrelid AS regclass))), 0)
            / CAST(current_setting('block_size') AS bigint) AS bigint)
  FROM pg_inherits i WHERE i.inhparent = CAST('postroom.archive' AS regclass)
