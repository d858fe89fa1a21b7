-- What SQLite says differently.

-- name: inbox_list
SELECT consumer, message_id, handled_at FROM postroom_inbox
 WHERE :consumer IS NULL OR consumer = :consumer ORDER BY handled_at DESC LIMIT :rows

-- name: inbox_show
SELECT consumer, message_id, handled_at, digest FROM postroom_inbox
 WHERE consumer = :consumer AND message_id = :message_id

-- name: waiting_list
SELECT consumer, message_id, topic, key, type, attempts, error_code, error, blocked, aside, held_at,
       (next_attempt_at - NOW_US) / 1000
  FROM postroom_inbox_held WHERE :consumer IS NULL OR consumer = :consumer
 ORDER BY consumer, position LIMIT :rows

-- name: waiting_show
SELECT topic, key, type, attempts, error_code, error, blocked, aside, held_at,
       (next_attempt_at - NOW_US) / 1000,
       content_type, headers, payload, history, redrives, position
  FROM postroom_inbox_held WHERE consumer = :consumer AND message_id = :message_id

-- name: read_outbox
SELECT position, id, topic, type, content_type, payload FROM postroom_outbox
 WHERE lane = :lane AND position > :after ORDER BY position LIMIT :rows

-- name: read_held
SELECT position, id, topic, type, content_type, payload FROM postroom_held
 WHERE lane = :lane AND position > :after AND NOT blocked ORDER BY position LIMIT :rows

-- name: read_delayed
SELECT id, topic, type, content_type, payload FROM postroom_delayed
 WHERE lane = :lane AND id > :after ORDER BY id LIMIT :rows

-- name: read_dead
SELECT source, id, position, topic, type, content_type, payload FROM postroom_dead_letter
 WHERE (source, id, position) > (:source, :id, :position) AND state IN ('dead', 'queued')
 ORDER BY source, id, position LIMIT :rows

-- name: read_waiting
SELECT position, message_id, topic, type, content_type, payload FROM postroom_inbox_held
 WHERE consumer = :consumer AND position > :after AND NOT blocked ORDER BY position LIMIT :rows

-- name: oldest_letter
SELECT (NOW_US - MIN(created_at)) / 1000000 FROM postroom_dead_letter
 WHERE state IN ('dead', 'queued') AND source = 'outbox'

-- name: consumers
SELECT name, broker, topics, (NOW_US - seen_at) / 1000
  FROM postroom_consumer ORDER BY name LIMIT 1000

-- name: seats
SELECT consumer, source, owner FROM postroom_seat ORDER BY consumer, source LIMIT 10000
