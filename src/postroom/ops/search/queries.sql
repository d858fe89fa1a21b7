-- Pages of messages, for looking through them: by primary key, without payloads unless asked for.

-- name: outbox_page
SELECT 'pending', lane, position, CAST(id AS text), topic, key, type, aggregate_type, aggregate_id,
       size, 0, NULL, CAST(extract(epoch FROM created_at) * 1000000 AS bigint), CAST(NULL AS bigint),
       CASE WHEN :payloads = 1 THEN payload END
  FROM postroom.outbox WHERE lane = :lane AND position > :after
 ORDER BY position LIMIT CAST(:rows AS bigint)

-- name: held_page
SELECT CASE WHEN blocked THEN 'dead' ELSE 'held' END, lane, position, CAST(id AS text), topic, key,
       type, aggregate_type, aggregate_id, size, attempts, error_code,
       CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM next_attempt_at) * 1000000 AS bigint),
       CASE WHEN :payloads = 1 THEN payload END
  FROM postroom.held WHERE lane = :lane AND position > :after
 ORDER BY position LIMIT CAST(:rows AS bigint)

-- name: delayed_page
SELECT 'delayed', lane, CAST(extract(epoch FROM deliver_at) * 1000000 AS bigint), CAST(id AS text),
       topic, key, type, aggregate_type, aggregate_id, size, 0, NULL,
       CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM deliver_at) * 1000000 AS bigint),
       CASE WHEN :payloads = 1 THEN payload END
  FROM postroom.delayed WHERE lane = :lane
 ORDER BY deliver_at, id LIMIT CAST(:rows AS bigint)

-- name: archive_page
-- A range of blocks of each day: PostgreSQL's archive has no index in the order of ids.
SELECT 'delivered', lane, position, CAST(id AS text), topic, key, type, aggregate_type,
       aggregate_id, size, attempts, NULL,
       CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM delivered_at) * 1000000 AS bigint),
       CASE WHEN :payloads = 1 THEN payload END
  FROM postroom.archive
 WHERE ctid >= CAST('(' || CAST(:block AS bigint) || ',0)' AS tid)
   AND ctid < CAST('(' || CAST(:block AS bigint) + CAST(:blocks AS bigint) || ',0)' AS tid)
 ORDER BY archive.id, day

-- name: dead_letter_page
SELECT CASE WHEN state = 'resolved' AND error_code = 'expired' THEN 'expired' ELSE state END,
       lane, position, CAST(id AS text), topic, key, type, aggregate_type, aggregate_id,
       size, attempts, error_code, CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM died_at) * 1000000 AS bigint),
       CASE WHEN :payloads = 1 THEN payload END
  FROM postroom.dead_letter
 WHERE source = 'outbox' AND id > CAST(CAST(:after_id AS text) AS uuid)
 ORDER BY source, id, position LIMIT CAST(:rows AS bigint)

-- name: batches
-- The batches in flight, as recorded by the relays that own lanes.
SELECT b.lane, b.lo, b.hi FROM postroom.lane_batch b
  JOIN postroom.lane l ON l.lane = b.lane AND l.owner = b.incarnation
