-- What MariaDB says differently. Text out of JSON is given the tables' collation, or no index is used.

-- name: insert
-- What else IGNORE would pass over (values too long, or missing) was checked before.
INSERT IGNORE INTO postroom_inbox (consumer, message_id, digest)
VALUES (:consumer, :message_id, :digest) RETURNING 1

-- name: digest
-- A locking read, since a snapshot taken before the other's commit would not show its row.
SELECT digest FROM postroom_inbox
 WHERE consumer = :consumer AND message_id = :message_id LOCK IN SHARE MODE

-- name: seat_take
INSERT INTO postroom_seat (consumer, source, owner, epoch) VALUES (:consumer, :source, :owner, 1)
ON DUPLICATE KEY UPDATE owner = VALUES(owner), epoch = epoch + 1, taken_at = UTC_TIMESTAMP(6);
SELECT epoch FROM postroom_seat WHERE consumer = :consumer AND source = :source;

-- name: enter
-- The session's own timeout ends the transaction of a frozen process (:stuck_ms was given to it).
SELECT STRAIGHT_JOIN s.source, s.epoch
  FROM JSON_TABLE(:seats, '$[*]' COLUMNS (
           source VARCHAR(255) PATH '$.source', epoch BIGINT PATH '$.epoch')) w
  JOIN postroom_seat s
    ON s.consumer = :consumer
   AND s.source = CONVERT(w.source USING utf8mb4) COLLATE utf8mb4_nopad_bin
   AND s.epoch = w.epoch AND s.owner = :owner
 LOCK IN SHARE MODE

-- name: claim
INSERT IGNORE INTO postroom_inbox (consumer, message_id, digest)
SELECT :consumer, w.id, w.digest
  FROM JSON_TABLE(:entries, '$[*]' COLUMNS (
           id VARCHAR(255) PATH '$.id', digest CHAR(64) PATH '$.digest')) w
 ORDER BY w.id
RETURNING message_id

-- name: known
-- A locking read, since a snapshot taken before the other's commit would not show its row.
SELECT STRAIGHT_JOIN i.message_id, i.digest
  FROM JSON_TABLE(:entries, '$[*]' COLUMNS (id VARCHAR(255) PATH '$.id')) w
  JOIN postroom_inbox i
    ON i.consumer = :consumer
   AND i.message_id = CONVERT(w.id USING utf8mb4) COLLATE utf8mb4_nopad_bin
 LOCK IN SHARE MODE

-- name: held_keys
SELECT w.topic, w.`key`
  FROM JSON_TABLE(:keys, '$[*]' COLUMNS (
           topic VARCHAR(255) PATH '$.topic', `key` VARCHAR(255) PATH '$.key')) w
 WHERE EXISTS (SELECT 1 FROM postroom_inbox_held h
                WHERE h.consumer = :consumer
                  AND h.topic = CONVERT(w.topic USING utf8mb4) COLLATE utf8mb4_nopad_bin
                  AND h.`key` = CONVERT(w.`key` USING utf8mb4) COLLATE utf8mb4_nopad_bin
                  AND NOT h.aside)

-- name: held_tail
SELECT position FROM postroom_inbox_held FORCE INDEX (inbox_held_key)
 WHERE consumer = :consumer AND topic = :topic AND `key` = :key AND NOT aside
 ORDER BY position DESC LIMIT 1 LOCK IN SHARE MODE

-- name: park
INSERT INTO postroom_inbox_held (consumer, message_id, topic, `key`, type, content_type, headers,
       payload, size, attempts, history, error_code, error, next_attempt_at)
VALUES (:consumer, :message_id, :topic, :key, :type, :content_type, :headers, :payload, :size,
        :attempts, :history, :error_code, :error,
        UTC_TIMESTAMP(6) + INTERVAL :delay_us MICROSECOND)

-- name: due_any
SELECT 1 FROM postroom_inbox_held
 WHERE consumer = :consumer AND next_attempt_at <= UTC_TIMESTAMP(6) LIMIT 1

-- name: due
SELECT position, message_id, topic, `key`, type, content_type, headers, payload, attempts, history,
       redrives
  FROM postroom_inbox_held FORCE INDEX (inbox_held_due)
 WHERE consumer = :consumer AND next_attempt_at <= UTC_TIMESTAMP(6)
 ORDER BY next_attempt_at, position LIMIT :rows FOR UPDATE SKIP LOCKED

-- name: lease
UPDATE JSON_TABLE(:positions, '$[*]' COLUMNS (position BIGINT PATH '$')) w
  STRAIGHT_JOIN postroom_inbox_held h FORCE INDEX (PRIMARY)
    ON h.consumer = :consumer AND h.position = w.position
   SET h.next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL :pause_us MICROSECOND,
       h.lease_us = :pause_us

-- name: lease_cap
UPDATE postroom_inbox_held
   SET next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL lease_us MICROSECOND
 WHERE consumer = :consumer AND next_attempt_at > UTC_TIMESTAMP(6)
   AND next_attempt_at > UTC_TIMESTAMP(6) + INTERVAL lease_us MICROSECOND

-- name: start
UPDATE postroom_inbox_held
   SET attempts = attempts + 1,
       next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL :pause_us MICROSECOND, lease_us = :pause_us
 WHERE consumer = :consumer AND position = :position

-- name: unlease
UPDATE postroom_inbox_held SET next_attempt_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND position = :position AND attempts = :attempts AND NOT blocked
   AND next_attempt_at IS NOT NULL

-- name: lock_parked
SELECT position FROM postroom_inbox_held FORCE INDEX (PRIMARY)
 WHERE consumer = :consumer AND position = :position AND attempts = :attempts AND NOT blocked
   FOR UPDATE

-- name: behind
SELECT position, message_id, topic, `key`, type, content_type, headers, payload, attempts, history,
       redrives
  FROM postroom_inbox_held FORCE INDEX (inbox_held_key)
 WHERE consumer = :consumer AND topic = :topic AND `key` = :key AND NOT aside
   AND position < coalesce((SELECT min(b.position) FROM postroom_inbox_held b
                             WHERE b.consumer = :consumer AND b.topic = :topic AND b.`key` = :key
                               AND b.blocked AND NOT b.aside), 9223372036854775807)
 ORDER BY position LIMIT :rows FOR UPDATE

-- name: drop_parked
-- Row by row through the index: a scan, which a short table may lead to, would wait for the rows of
-- every handler that is at work.
DELETE h FROM JSON_TABLE(:positions, '$[*]' COLUMNS (position BIGINT PATH '$')) w
  STRAIGHT_JOIN postroom_inbox_held h FORCE INDEX (PRIMARY)
    ON h.consumer = :consumer AND h.position = w.position

-- name: handled
-- Changed first, since an INSERT that meets its row locks the gap beside it too.
UPDATE postroom_inbox SET handled_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND message_id = :message_id;
INSERT IGNORE INTO postroom_inbox (consumer, message_id)
SELECT :consumer, :message_id FROM DUAL WHERE ROW_COUNT() = 0;

-- name: head
SELECT position FROM postroom_inbox_held FORCE INDEX (inbox_held_key)
 WHERE consumer = :consumer AND topic = :topic AND `key` = :key AND NOT aside
 ORDER BY position LIMIT 1

-- name: arm
-- By its place alone, or rows of others would be waited for.
UPDATE postroom_inbox_held SET next_attempt_at = UTC_TIMESTAMP(6)
 WHERE consumer = :consumer AND position = :position AND next_attempt_at IS NULL AND NOT blocked

-- name: disarm
UPDATE postroom_inbox_held FORCE INDEX (inbox_held_key) SET next_attempt_at = NULL
 WHERE consumer = :consumer AND topic = :topic AND `key` = :key AND next_attempt_at IS NOT NULL

-- name: fail_parked
UPDATE postroom_inbox_held
   SET attempts = :attempts, history = :history, error_code = :error_code, error = :error,
       next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL :delay_us MICROSECOND, lease_us = NULL
 WHERE consumer = :consumer AND position = :position

-- name: bury
INSERT INTO postroom_dead_letter (source, id, lane, position, topic, `key`, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, created_at, state, holds_key,
       error_code, error, attempts, history, redrives, died_at)
SELECT :source, :id, :lane, h.position, h.topic, h.`key`, h.type, :aggregate_type, :aggregate_id,
       h.content_type, h.headers, h.payload, h.size, h.held_at, 'dead', :holds_key, :error_code,
       :error, :attempts, :history, h.redrives, UTC_TIMESTAMP(6)
  FROM postroom_inbox_held h WHERE h.consumer = :consumer AND h.position = :position
ON DUPLICATE KEY UPDATE state = VALUES(state), holds_key = VALUES(holds_key),
       error_code = VALUES(error_code), error = VALUES(error), attempts = VALUES(attempts),
       history = VALUES(history), redrives = VALUES(redrives), died_at = VALUES(died_at)

-- name: block
UPDATE postroom_inbox_held
   SET blocked = TRUE, aside = :aside, next_attempt_at = NULL, attempts = :attempts,
       history = :history, error_code = :error_code, error = :error
 WHERE consumer = :consumer AND position = :position

-- name: resolve
UPDATE postroom_dead_letter SET state = 'resolved', ended_at = UTC_TIMESTAMP(6)
 WHERE source = :source AND id = :id AND position = :position AND state = 'queued'

-- name: lock_key
SELECT position, blocked, aside FROM postroom_inbox_held FORCE INDEX (inbox_held_key)
 WHERE consumer = :consumer AND topic = :topic AND `key` = :key ORDER BY position FOR UPDATE

-- name: lock_one
SELECT position, blocked, aside FROM postroom_inbox_held
 WHERE consumer = :consumer AND position = :position FOR UPDATE

-- name: unblock
UPDATE postroom_inbox_held
   SET blocked = FALSE, aside = FALSE, attempts = 0, redrives = redrives + 1,
       next_attempt_at = CASE WHEN `key` IS NULL THEN UTC_TIMESTAMP(6) END
 WHERE consumer = :consumer AND position = :position AND blocked

-- name: beat
INSERT INTO postroom_worker (incarnation, kind, name, report)
VALUES (:incarnation, 'consumer', :worker_name, :report)
ON DUPLICATE KEY UPDATE seen_at = UTC_TIMESTAMP(6), report = VALUES(report)

-- name: register
INSERT INTO postroom_consumer (name, broker, topics) VALUES (:consumer, :broker, :topics)
ON DUPLICATE KEY UPDATE broker = VALUES(broker), topics = VALUES(topics), seen_at = UTC_TIMESTAMP(6)

-- name: silent
SELECT report FROM postroom_worker
 WHERE kind = 'consumer' AND seen_at BETWEEN UTC_TIMESTAMP(6) - INTERVAL 600 SECOND
                                         AND UTC_TIMESTAMP(6) - INTERVAL 15 SECOND
 LIMIT 1000

-- name: measure
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom_inbox_held h
                               WHERE h.consumer = :consumer LIMIT :most) n),
       (SELECT count(*) FROM (SELECT 1 FROM postroom_inbox_held h
                               WHERE h.consumer = :consumer AND h.blocked LIMIT :most) n),
       (SELECT TIMESTAMPDIFF(MICROSECOND, h.held_at, UTC_TIMESTAMP(6)) DIV 1000
          FROM postroom_inbox_held h WHERE h.consumer = :consumer AND NOT h.blocked
         ORDER BY h.position LIMIT 1),
       (SELECT count(DISTINCT n.topic, n.`key`)
          FROM (SELECT h.topic, h.`key` FROM postroom_inbox_held h
                 WHERE h.consumer = :consumer AND h.`key` IS NOT NULL AND NOT h.aside
                 LIMIT :most) n),
       (SELECT count(DISTINCT n.topic, n.`key`)
          FROM (SELECT h.topic, h.`key` FROM postroom_inbox_held h
                 WHERE h.consumer = :consumer AND h.`key` IS NOT NULL AND NOT h.aside AND h.blocked
                 LIMIT :most) n)
