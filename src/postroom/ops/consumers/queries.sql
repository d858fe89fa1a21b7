-- What operators ask about consumers: what they have handled, what waits in them, what they can read.

-- name: inbox_list
SELECT consumer, message_id, CAST(extract(epoch FROM handled_at) * 1000000 AS bigint)
  FROM postroom.inbox
 WHERE CAST(:consumer AS text) IS NULL OR consumer = CAST(:consumer AS text)
 ORDER BY handled_at DESC LIMIT CAST(:rows AS bigint)

-- name: inbox_show
SELECT consumer, message_id, CAST(extract(epoch FROM handled_at) * 1000000 AS bigint), digest
  FROM postroom.inbox WHERE consumer = :consumer AND message_id = :message_id

-- name: waiting_list
SELECT consumer, message_id, topic, key, type, attempts, error_code, error, CAST(blocked AS int),
       CAST(aside AS int), CAST(extract(epoch FROM held_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM next_attempt_at - clock_timestamp()) * 1000 AS bigint)
  FROM postroom.inbox_held
 WHERE CAST(:consumer AS text) IS NULL OR consumer = CAST(:consumer AS text)
 ORDER BY consumer, position LIMIT CAST(:rows AS bigint)

-- name: waiting_show
SELECT topic, key, type, attempts, error_code, error, CAST(blocked AS int),
       CAST(aside AS int), CAST(extract(epoch FROM held_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM next_attempt_at - clock_timestamp()) * 1000 AS bigint),
       content_type, headers, payload, history, redrives, position
  FROM postroom.inbox_held WHERE consumer = :consumer AND message_id = :message_id

-- name: read_outbox
SELECT position, CAST(id AS text), topic, type, content_type, payload FROM postroom.outbox
 WHERE lane = :lane AND position > CAST(:after AS bigint)
 ORDER BY position LIMIT CAST(:rows AS bigint)

-- name: read_held
SELECT position, CAST(id AS text), topic, type, content_type, payload FROM postroom.held
 WHERE lane = :lane AND position > CAST(:after AS bigint) AND NOT blocked
 ORDER BY position LIMIT CAST(:rows AS bigint)

-- name: read_delayed
SELECT CAST(id AS text), topic, type, content_type, payload FROM postroom.delayed
 WHERE lane = :lane AND id > CAST(CAST(:after AS text) AS uuid)
 ORDER BY id LIMIT CAST(:rows AS bigint)

-- name: read_dead
SELECT source, CAST(id AS text), position, topic, type, content_type, payload
  FROM postroom.dead_letter
 WHERE (source, id, position) >
       (CAST(:source AS text), CAST(CAST(:id AS text) AS uuid), CAST(:position AS bigint))
   AND state IN ('dead', 'queued')
 ORDER BY source, id, position LIMIT CAST(:rows AS bigint)

-- name: read_waiting
SELECT position, message_id, topic, type, content_type, payload FROM postroom.inbox_held
 WHERE consumer = :consumer AND position > CAST(:after AS bigint) AND NOT blocked
 ORDER BY position LIMIT CAST(:rows AS bigint)

-- name: oldest_letter
-- Seconds since the oldest message died that may still be sent to consumers again.
SELECT CAST(extract(epoch FROM clock_timestamp() - min(created_at)) AS bigint)
  FROM postroom.dead_letter WHERE state IN ('dead', 'queued') AND source = 'outbox'

-- name: consumers
-- Every consumer that has received here, and how long ago a process of it began or ended.
SELECT name, broker, topics,
       CAST(extract(epoch FROM clock_timestamp() - seen_at) * 1000 AS bigint)
  FROM postroom.consumer ORDER BY name LIMIT 1000

-- name: seats
SELECT consumer, source, owner FROM postroom.seat ORDER BY consumer, source LIMIT 10000
