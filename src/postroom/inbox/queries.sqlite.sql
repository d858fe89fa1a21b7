-- What SQLite says differently. A handler's transaction has the one writer's lock from its beginning,
-- so nothing else needs one.

-- name: insert
INSERT INTO postroom_inbox (consumer, message_id, digest) VALUES (:consumer, :message_id, :digest)
ON CONFLICT DO NOTHING;
SELECT changes();

-- name: seat_take
INSERT INTO postroom_seat (consumer, source, owner, epoch) VALUES (:consumer, :source, :owner, 1)
ON CONFLICT (consumer, source) DO UPDATE
   SET owner = excluded.owner, epoch = epoch + 1, taken_at = NOW_US;
SELECT epoch FROM postroom_seat WHERE consumer = :consumer AND source = :source;

-- name: begin
-- On a connection that is not ours: a first write waits for the write lock and acquires it.
DELETE FROM postroom_seat WHERE 0

-- name: enter
SELECT s.source, s.epoch FROM json_each(:seats) w
 CROSS JOIN postroom_seat s
    ON s.consumer = :consumer AND s.source = json_extract(w.value, '$.source')
   AND s.epoch = json_extract(w.value, '$.epoch') AND s.owner = :owner

-- name: claim
-- Looked for first, which nobody can come between: RETURNING would need SQLite 3.35.
CREATE TEMP TABLE IF NOT EXISTS postroom_fresh (id TEXT PRIMARY KEY, digest TEXT);
DELETE FROM postroom_fresh;
INSERT INTO postroom_fresh (id, digest)
SELECT json_extract(w.value, '$.id'), json_extract(w.value, '$.digest') FROM json_each(:entries) w
 WHERE NOT EXISTS (SELECT 1 FROM postroom_inbox i
                    WHERE i.consumer = :consumer AND i.message_id = json_extract(w.value, '$.id'));
INSERT INTO postroom_inbox (consumer, message_id, digest)
SELECT :consumer, f.id, f.digest FROM postroom_fresh f;
SELECT id FROM postroom_fresh;

-- name: known
-- CROSS: else it goes through all that the consumer remembers, with the entries inside.
SELECT i.message_id, i.digest FROM json_each(:entries) w
 CROSS JOIN postroom_inbox i
    ON i.consumer = :consumer AND i.message_id = json_extract(w.value, '$.id')

-- name: held_keys
SELECT json_extract(w.value, '$.topic'), json_extract(w.value, '$.key') FROM json_each(:keys) w
 WHERE EXISTS (SELECT 1 FROM postroom_inbox_held h
                WHERE h.consumer = :consumer AND h.topic = json_extract(w.value, '$.topic')
                  AND h.key = json_extract(w.value, '$.key') AND NOT h.aside)

-- name: held_tail
SELECT position FROM postroom_inbox_held
 WHERE consumer = :consumer AND topic = :topic AND key = :key AND NOT aside
 ORDER BY position DESC LIMIT 1

-- name: park
INSERT INTO postroom_inbox_held (consumer, message_id, topic, key, type, content_type, headers,
       payload, size, attempts, history, error_code, error, next_attempt_at)
VALUES (:consumer, :message_id, :topic, :key, :type, :content_type, :headers, :payload, :size,
        :attempts, :history, :error_code, :error, NOW_US + :delay_us)

-- name: due_any
SELECT 1 FROM postroom_inbox_held
 WHERE consumer = :consumer AND next_attempt_at <= NOW_US LIMIT 1

-- name: due
SELECT position, message_id, topic, key, type, content_type, headers, payload, attempts, history,
       redrives
  FROM postroom_inbox_held
 WHERE consumer = :consumer AND next_attempt_at <= NOW_US
 ORDER BY next_attempt_at, position LIMIT :rows

-- name: lease
UPDATE postroom_inbox_held SET next_attempt_at = NOW_US + :pause_us, lease_us = :pause_us
 WHERE consumer = :consumer AND position IN (SELECT value FROM json_each(:positions))

-- name: lease_cap
UPDATE postroom_inbox_held SET next_attempt_at = NOW_US + lease_us
 WHERE consumer = :consumer AND next_attempt_at > NOW_US AND next_attempt_at > NOW_US + lease_us

-- name: start
UPDATE postroom_inbox_held SET attempts = attempts + 1, next_attempt_at = NOW_US + :pause_us,
       lease_us = :pause_us
 WHERE consumer = :consumer AND position = :position

-- name: unlease
UPDATE postroom_inbox_held SET next_attempt_at = NOW_US
 WHERE consumer = :consumer AND position = :position AND attempts = :attempts AND NOT blocked
   AND next_attempt_at IS NOT NULL

-- name: lock_parked
SELECT position FROM postroom_inbox_held
 WHERE consumer = :consumer AND position = :position AND attempts = :attempts AND NOT blocked

-- name: behind
SELECT position, message_id, topic, key, type, content_type, headers, payload, attempts, history,
       redrives
  FROM postroom_inbox_held
 WHERE consumer = :consumer AND topic = :topic AND key = :key AND NOT aside
   AND position < coalesce((SELECT min(b.position) FROM postroom_inbox_held b
                             WHERE b.consumer = :consumer AND b.topic = :topic AND b.key = :key
                               AND b.blocked AND NOT b.aside), 9223372036854775807)
 ORDER BY position LIMIT :rows

-- name: drop_parked
DELETE FROM postroom_inbox_held
 WHERE consumer = :consumer AND position IN (SELECT value FROM json_each(:positions))

-- name: handled
INSERT INTO postroom_inbox (consumer, message_id) VALUES (:consumer, :message_id)
ON CONFLICT (consumer, message_id) DO UPDATE SET handled_at = NOW_US

-- name: arm
UPDATE postroom_inbox_held SET next_attempt_at = NOW_US
 WHERE consumer = :consumer AND position = :position AND next_attempt_at IS NULL AND NOT blocked

-- name: fail_parked
UPDATE postroom_inbox_held
   SET attempts = :attempts, history = :history, error_code = :error_code, error = :error,
       next_attempt_at = NOW_US + :delay_us, lease_us = NULL
 WHERE consumer = :consumer AND position = :position

-- name: bury
INSERT INTO postroom_dead_letter (source, id, lane, position, topic, key, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, created_at, state, holds_key,
       error_code, error, attempts, history, redrives, died_at)
SELECT :source, :id, :lane, h.position, h.topic, h.key, h.type, :aggregate_type, :aggregate_id,
       h.content_type, h.headers, h.payload, h.size, h.held_at, 'dead', :holds_key, :error_code,
       :error, :attempts, :history, h.redrives, NOW_US
  FROM postroom_inbox_held h WHERE h.consumer = :consumer AND h.position = :position
ON CONFLICT (source, id, position) DO UPDATE
   SET state = excluded.state, holds_key = excluded.holds_key, error_code = excluded.error_code,
       error = excluded.error, attempts = excluded.attempts, history = excluded.history,
       redrives = excluded.redrives, died_at = excluded.died_at

-- name: block
UPDATE postroom_inbox_held
   SET blocked = 1, aside = :aside, next_attempt_at = NULL, attempts = :attempts,
       history = :history, error_code = :error_code, error = :error
 WHERE consumer = :consumer AND position = :position

-- name: resolve
UPDATE postroom_dead_letter SET state = 'resolved', ended_at = NOW_US
 WHERE source = :source AND id = :id AND position = :position AND state = 'queued'

-- name: lock_key
SELECT position, blocked, aside FROM postroom_inbox_held
 WHERE consumer = :consumer AND topic = :topic AND key = :key ORDER BY position

-- name: lock_one
SELECT position, blocked, aside FROM postroom_inbox_held
 WHERE consumer = :consumer AND position = :position

-- name: unblock
UPDATE postroom_inbox_held
   SET blocked = 0, aside = 0, attempts = 0, redrives = redrives + 1,
       next_attempt_at = CASE WHEN key IS NULL THEN NOW_US END
 WHERE consumer = :consumer AND position = :position AND blocked

-- name: beat
INSERT INTO postroom_worker (incarnation, kind, name, report)
VALUES (:incarnation, 'consumer', :worker_name, :report)
ON CONFLICT (incarnation) DO UPDATE SET seen_at = NOW_US, report = excluded.report

-- name: register
INSERT INTO postroom_consumer (name, broker, topics) VALUES (:consumer, :broker, :topics)
ON CONFLICT (name) DO UPDATE
   SET broker = excluded.broker, topics = excluded.topics, seen_at = NOW_US

-- name: silent
SELECT report FROM postroom_worker
 WHERE kind = 'consumer' AND seen_at BETWEEN NOW_US - 600 * 1000000 AND NOW_US - 15 * 1000000
 LIMIT 1000

-- name: measure
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom_inbox_held h
                               WHERE h.consumer = :consumer LIMIT :most) n),
       (SELECT count(*) FROM (SELECT 1 FROM postroom_inbox_held h
                               WHERE h.consumer = :consumer AND h.blocked LIMIT :most) n),
       (SELECT (NOW_US - h.held_at) / 1000
          FROM postroom_inbox_held h WHERE h.consumer = :consumer AND NOT h.blocked
         ORDER BY h.position LIMIT 1),
       (SELECT count(DISTINCT n.topic || ' ' || n.key)
          FROM (SELECT h.topic, h.key FROM postroom_inbox_held h
                 WHERE h.consumer = :consumer AND h.key IS NOT NULL AND NOT h.aside
                 LIMIT :most) n),
       (SELECT count(DISTINCT n.topic || ' ' || n.key)
          FROM (SELECT h.topic, h.key FROM postroom_inbox_held h
                 WHERE h.consumer = :consumer AND h.key IS NOT NULL AND NOT h.aside AND h.blocked
                 LIMIT :most) n)
