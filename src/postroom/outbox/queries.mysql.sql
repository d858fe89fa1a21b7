-- What MariaDB says differently. Lists of numbers are written into the text: they are ours, and
-- MariaDB has no array to bind. Times are UTC.

-- name: meta_write
INSERT INTO postroom_meta (name, value) VALUES (:item, :value)
ON DUPLICATE KEY UPDATE value = VALUES(value)

-- name: worker_beat
INSERT INTO postroom_worker (incarnation, kind, name, report)
VALUES (:incarnation, :kind, :worker_name, :report)
ON DUPLICATE KEY UPDATE seen_at = UTC_TIMESTAMP(6), report = VALUES(report)

-- name: workers_live
SELECT incarnation FROM postroom_worker
 WHERE kind = :kind AND seen_at > UTC_TIMESTAMP(6) - INTERVAL :within_us MICROSECOND
 ORDER BY incarnation

-- name: workers_forget
DELETE FROM postroom_worker WHERE seen_at < UTC_TIMESTAMP(6) - INTERVAL 86400 SECOND

-- name: lanes_state
SELECT lane, owner, paused, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), lease_until), lease_us
  FROM postroom_lane ORDER BY lane

-- name: lanes_cap
UPDATE postroom_lane
   SET lease_until = UTC_TIMESTAMP(6) + INTERVAL COALESCE(lease_us, :lease_us) MICROSECOND
 WHERE owner IS NOT NULL
   AND lease_until > UTC_TIMESTAMP(6) + INTERVAL COALESCE(lease_us, :lease_us) MICROSECOND

-- name: lanes_lock_free
SELECT lane, epoch FROM postroom_lane
 WHERE lane IN :lane_list AND NOT paused
   AND (owner IS NULL OR owner = :owner OR lease_until < UTC_TIMESTAMP(6))
 ORDER BY lane FOR UPDATE SKIP LOCKED

-- name: lanes_take
UPDATE postroom_lane
   SET owner = :owner, epoch = epoch + 1,
       lease_until = UTC_TIMESTAMP(6) + INTERVAL :lease_us MICROSECOND, lease_us = :lease_us
 WHERE lane IN :lane_list

-- name: lanes_renew
UPDATE postroom_lane
   SET lease_until = UTC_TIMESTAMP(6) + INTERVAL :lease_us MICROSECOND, lease_us = :lease_us
 WHERE owner = :owner;
SELECT lane, epoch, paused FROM postroom_lane WHERE owner = :owner;

-- name: lanes_release
UPDATE postroom_lane SET owner = NULL, lease_until = NULL
 WHERE owner = :owner AND epoch * 16 + lane IN :fence_list

-- name: lanes_notice
SELECT l.lane, l.paused, EXISTS (SELECT 1 FROM postroom_held h WHERE h.lane = l.lane)
  FROM postroom_lane l WHERE l.lane IN :lane_list

-- name: lane_sizes
-- How far a read of this lane may go: sizes first, since the payloads must fit in memory.
SELECT position, size FROM postroom_outbox
 WHERE lane = :lane AND position > :after ORDER BY position LIMIT :rows

-- name: read_lane
SELECT o.lane, o.position, o.id, o.topic, o.`key`, o.type, o.aggregate_type, o.aggregate_id,
       o.content_type, o.headers, o.payload, o.size, o.redrives,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', o.created_at),
       COALESCE(o.expires_at <= UTC_TIMESTAMP(6), 0),
       CASE WHEN :probe = 1 AND EXISTS (
           SELECT 1 FROM postroom_held h
            WHERE h.lane = o.lane AND h.topic = o.topic AND h.`key` = o.`key`) THEN 1 ELSE 0 END,
       0, NULL
  FROM postroom_outbox o
 WHERE o.lane = :lane AND o.position > :after AND o.position <= :upto
 ORDER BY o.position LIMIT :rows

-- name: held_due
SELECT m.lane, m.position, m.id, m.topic, m.`key`, m.type, m.aggregate_type, m.aggregate_id,
       m.content_type, m.headers, m.payload, m.size, m.redrives,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.created_at),
       COALESCE(m.expires_at <= UTC_TIMESTAMP(6), 0), 1, m.attempts, m.history
  FROM (SELECT h.*, SUM(h.size) OVER (ORDER BY h.next_attempt_at, h.position) AS running
          FROM (SELECT * FROM postroom_held
                 WHERE lane = :lane AND next_attempt_at <= UTC_TIMESTAMP(6)
                 ORDER BY next_attempt_at, position LIMIT :rows) h) m
 WHERE m.running - m.size < :bytes
 ORDER BY m.position

-- name: held_run
SELECT m.lane, m.position, m.id, m.topic, m.`key`, m.type, m.aggregate_type, m.aggregate_id,
       m.content_type, m.headers, m.payload, m.size, m.redrives,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.created_at),
       COALESCE(m.expires_at <= UTC_TIMESTAMP(6), 0), 1, m.attempts, m.history
  FROM (SELECT h.*, SUM(h.size) OVER (ORDER BY h.position) AS running,
               SUM(h.blocked) OVER (ORDER BY h.position) AS stopped
          FROM (SELECT * FROM postroom_held
                 WHERE lane = :lane AND topic = :topic AND `key` = :key
                 ORDER BY position LIMIT :rows) h) m
 WHERE m.running - m.size < :bytes AND m.stopped = 0
 ORDER BY m.position

-- name: journal_read
SELECT incarnation, batch, lo, hi, messages, alone, held FROM postroom_lane_batch
 WHERE lane = :lane ORDER BY lo, incarnation, batch

-- name: fence
-- By primary key, or the rows of every other relay's lanes would be waited for too.
SELECT lane FROM postroom_lane
 WHERE lane IN :lane_list AND owner = :owner AND epoch * 16 + lane IN :fence_list
 ORDER BY lane LOCK IN SHARE MODE

-- name: journal_write
SELECT lane FROM postroom_lane
 WHERE lane IN :lane_list AND owner = :owner AND epoch * 16 + lane IN :fence_list
 ORDER BY lane LOCK IN SHARE MODE;
INSERT INTO postroom_lane_batch (lane, incarnation, batch, lo, hi, messages, alone, held)
SELECT w.lane, :owner, w.batch, w.lo, w.hi, w.messages, w.alone, w.held
  FROM JSON_TABLE(:entries, '$[*]' COLUMNS (
           lane INT PATH '$.lane', batch BIGINT PATH '$.batch', lo BIGINT PATH '$.lo',
           hi BIGINT PATH '$.hi', messages INT PATH '$.messages', alone INT PATH '$.alone',
           held INT PATH '$.held')) w
 WHERE w.lane IN (
       SELECT l.lane FROM postroom_lane l
        WHERE l.owner = :owner AND l.epoch * 16 + l.lane IN :fence_list);

-- name: journal_clear
DELETE FROM postroom_lane_batch
 WHERE incarnation = :owner AND lane IN :lane_list AND batch IN :batch_list

-- name: journal_acquit
DELETE FROM postroom_lane_batch
 WHERE lane = :lane AND lo = :position AND hi = lo AND (alone OR :late = 1)

-- name: outbox_archive
INSERT INTO postroom_archive (day, id, lane, position, topic, `key`, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, redrives, attempts, created_at,
       delivered_at)
SELECT UTC_DATE(), s.id, s.lane, s.position, s.topic, s.`key`, s.type, s.aggregate_type,
       s.aggregate_id, s.content_type, s.headers, s.payload, s.size, s.redrives, 1, s.created_at,
       UTC_TIMESTAMP(6)
  FROM postroom_outbox s WHERE s.position IN :position_list
 ON DUPLICATE KEY UPDATE postroom_archive.attempts = postroom_archive.attempts

-- name: outbox_delete
-- Row by row through the index, in this order: a scan of the table, which a long list of positions
-- may lead to, would wait for the rows of every open publisher.
DELETE o FROM JSON_TABLE(:positions, '$[*]' COLUMNS (position BIGINT PATH '$')) w
  STRAIGHT_JOIN postroom_outbox o ON o.position = w.position;
SELECT ROW_COUNT();

-- name: held_archive
INSERT INTO postroom_archive (day, id, lane, position, topic, `key`, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, redrives, attempts, created_at,
       delivered_at)
SELECT UTC_DATE(), s.id, s.lane, s.position, s.topic, s.`key`, s.type, s.aggregate_type,
       s.aggregate_id, s.content_type, s.headers, s.payload, s.size, s.redrives, s.attempts + 1,
       s.created_at,
       UTC_TIMESTAMP(6)
  FROM postroom_held s WHERE s.position IN :position_list AND s.lane IN :lane_list
 ON DUPLICATE KEY UPDATE postroom_archive.attempts = postroom_archive.attempts

-- name: held_delete
DELETE FROM postroom_held
 WHERE position IN :position_list AND lane IN :lane_list;
SELECT ROW_COUNT();

-- name: hold
INSERT INTO postroom_held (lane, position, id, topic, `key`, type, aggregate_type, aggregate_id,
       content_type, headers, payload, size, redrives, created_at, expires_at)
SELECT lane, position, id, topic, `key`, type, aggregate_type, aggregate_id,
       content_type, headers, payload, size, redrives, created_at, expires_at
  FROM postroom_outbox WHERE position IN :position_list;
DELETE o FROM JSON_TABLE(:positions, '$[*]' COLUMNS (position BIGINT PATH '$')) w
  STRAIGHT_JOIN postroom_outbox o ON o.position = w.position;

-- name: hold_failed
UPDATE postroom_held
   SET attempts = :attempts, history = :history, error_code = :error_code, error = :error,
       next_attempt_at = LEAST(UTC_TIMESTAMP(6) + INTERVAL :delay_us MICROSECOND,
           COALESCE(expires_at, '9999-12-31'))
 WHERE lane = :lane AND position = :position

-- name: hold_later
UPDATE postroom_held
   SET next_attempt_at = LEAST(UTC_TIMESTAMP(6) + INTERVAL :delay_us MICROSECOND,
           COALESCE(expires_at, '9999-12-31'))
 WHERE position IN :position_list AND lane IN :lane_list

-- name: heads_arm
UPDATE postroom_held h
  JOIN (SELECT w.lane, (SELECT MIN(f.position) FROM postroom_held f FORCE INDEX (held_key)
                         WHERE f.lane = w.lane
                           AND f.topic = CONVERT(w.topic USING utf8mb4) COLLATE utf8mb4_nopad_bin
                           AND f.`key` = CONVERT(w.`key` USING utf8mb4) COLLATE utf8mb4_nopad_bin
                       ) AS position
          FROM JSON_TABLE(:keys, '$[*]' COLUMNS (
               lane INT PATH '$.lane', topic VARCHAR(255) PATH '$.topic',
               `key` VARCHAR(255) PATH '$.key')) w) first
    ON h.lane = first.lane AND h.position = first.position
   SET h.next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL :delay_us MICROSECOND
 WHERE h.next_attempt_at IS NULL AND NOT h.blocked

-- name: bury
INSERT INTO postroom_dead_letter (source, id, lane, position, topic, `key`, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, created_at, expires_at, state, holds_key,
       error_code, error, attempts, history, redrives,
       died_at)
SELECT 'outbox', h.id, h.lane, h.position, h.topic, h.`key`, h.type, h.aggregate_type,
       h.aggregate_id, h.content_type, h.headers, h.payload, h.size, h.created_at, h.expires_at,
       :state, :holds_key,
       :error_code, :error, :attempts, :history, h.redrives,
       UTC_TIMESTAMP(6)
  FROM postroom_held h WHERE h.lane = :lane AND h.position = :position
ON DUPLICATE KEY UPDATE state = VALUES(state),
       holds_key = VALUES(holds_key),
       error_code = VALUES(error_code),
       error = VALUES(error),
       attempts = VALUES(attempts),
       history = VALUES(history),
       redrives = VALUES(redrives),
       died_at = VALUES(died_at)

-- name: held_block
UPDATE postroom_held
   SET blocked = TRUE, next_attempt_at = NULL, attempts = :attempts, history = :history,
       error_code = :error_code, error = :error
 WHERE lane = :lane AND position = :position

-- name: redriven_resolve
UPDATE postroom_dead_letter
   SET state = 'resolved', ended_at = UTC_TIMESTAMP(6)
 WHERE source = 'outbox' AND id = :id AND position = :position AND state = 'queued'

-- name: delayed_lanes
SELECT l.lane FROM postroom_lane l
 WHERE l.lane IN :lane_list
   AND (SELECT 1 FROM postroom_delayed d
         WHERE d.lane = l.lane AND d.deliver_at <= UTC_TIMESTAMP(6) LIMIT 1) = 1

-- name: delayed_due
SELECT lane, CAST(deliver_at AS CHAR), id FROM postroom_delayed
 WHERE lane = :lane AND deliver_at <= UTC_TIMESTAMP(6)
 ORDER BY deliver_at, id LIMIT :rows

-- name: promote
INSERT INTO postroom_outbox (lane, id, topic, `key`, type, aggregate_type, aggregate_id,
       content_type, headers, payload, size, created_at, expires_at)
SELECT d.lane, d.id, d.topic, d.`key`, d.type, d.aggregate_type, d.aggregate_id, d.content_type,
       d.headers, d.payload, d.size, d.created_at, d.expires_at
  FROM JSON_TABLE(:entries, '$[*]' COLUMNS (
           lane INT PATH '$.lane', deliver_at VARCHAR(32) PATH '$.deliver_at',
           id VARCHAR(36) PATH '$.id')) w
  JOIN postroom_delayed d
    ON d.lane = w.lane AND d.deliver_at = CAST(w.deliver_at AS DATETIME(6))
   AND d.id = CONVERT(w.id USING ascii) COLLATE ascii_bin
 ORDER BY d.deliver_at, d.id;
DELETE d FROM JSON_TABLE(:entries, '$[*]' COLUMNS (
           lane INT PATH '$.lane', deliver_at VARCHAR(32) PATH '$.deliver_at',
           id VARCHAR(36) PATH '$.id')) w
  STRAIGHT_JOIN postroom_delayed d
    ON d.lane = w.lane AND d.deliver_at = CAST(w.deliver_at AS DATETIME(6))
   AND d.id = CONVERT(w.id USING ascii) COLLATE ascii_bin;

-- name: archive_days
SELECT 0

-- name: archive_overflow
SELECT 0

-- name: prune_archive
DELETE FROM postroom_archive
 WHERE day < DATE(UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND) LIMIT :rows;
SELECT ROW_COUNT();

-- name: prune_dedup
DELETE FROM postroom_dedup WHERE created_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND
 ORDER BY created_at LIMIT :rows;
SELECT ROW_COUNT();

-- name: prune_dead
DELETE FROM postroom_dead_letter
 WHERE state IN ('resolved', 'discarded')
   AND died_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND
 LIMIT :rows;
SELECT ROW_COUNT();

-- name: prune_overflow
SELECT 0

-- name: prune_inbox
DELETE FROM postroom_inbox WHERE handled_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND
   AND NOT EXISTS (SELECT 1 FROM postroom_inbox_held h
                    WHERE h.consumer = postroom_inbox.consumer
                      AND h.message_id = postroom_inbox.message_id)
 ORDER BY handled_at LIMIT :rows;
SELECT ROW_COUNT();

-- name: prune_keys
DELETE FROM postroom_idempotency_key
 WHERE expires_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND
   AND (status = 'completed' OR (status = 'failed' AND (
        mode <> 'resume' OR (locked_until IS NULL AND recovery_point IS NULL))))
 ORDER BY expires_at LIMIT :rows;
SELECT ROW_COUNT();

-- name: prune_jobs
-- Jobs first, then items: when no item is left to delete, no job is left either.
DELETE FROM postroom_job
 WHERE state <> 'running' AND updated_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND
   AND NOT EXISTS (SELECT 1 FROM postroom_job_item i WHERE i.job = postroom_job.id);
DELETE FROM postroom_job_item
 WHERE job IN (SELECT id FROM postroom_job
                WHERE state <> 'running'
                  AND updated_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND)
 LIMIT :rows;
SELECT ROW_COUNT();

-- name: clock
SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))

-- name: measure_lane
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom_outbox o
                               WHERE o.lane = :lane AND o.position > :after LIMIT :most) p),
       (SELECT count(*) FROM (SELECT 1 FROM postroom_held h
                               WHERE h.lane = :lane AND h.next_attempt_at > '1970-01-01'
                               LIMIT :most) n),
       (SELECT TIMESTAMPDIFF(MICROSECOND, o.created_at, UTC_TIMESTAMP(6)) DIV 1000
          FROM postroom_outbox o WHERE o.lane = :lane AND o.position > :after
         ORDER BY o.position LIMIT 1),
       (SELECT TIMESTAMPDIFF(MICROSECOND, d.deliver_at, UTC_TIMESTAMP(6)) DIV 1000
          FROM postroom_delayed d WHERE d.lane = :lane AND d.deliver_at <= UTC_TIMESTAMP(6)
         ORDER BY d.deliver_at LIMIT 1)

-- name: measure_held
SELECT TIMESTAMPDIFF(MICROSECOND, min(f.created_at), UTC_TIMESTAMP(6)) DIV 1000
  FROM (SELECT h.created_at, h.blocked FROM postroom_held h
         WHERE h.lane = :lane ORDER BY h.position LIMIT 200) f
 WHERE NOT f.blocked

-- name: measure_outbox
-- An upper limit: positions of transactions that were rolled back count too.
SELECT (SELECT position FROM postroom_outbox ORDER BY position DESC LIMIT 1)
     - (SELECT position FROM postroom_outbox ORDER BY position LIMIT 1) + 1

-- name: waiting_topics
SELECT w.topic, count(*)
  FROM (SELECT topic FROM (SELECT topic FROM postroom_outbox LIMIT :most) o
         UNION ALL
        SELECT topic FROM (SELECT topic FROM postroom_held WHERE NOT blocked LIMIT :most) h) w
 GROUP BY w.topic ORDER BY w.topic

-- name: measure_totals
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom_held LIMIT :most) h),
       (SELECT count(*) FROM (SELECT 1 FROM postroom_delayed LIMIT :most) d),
       (SELECT count(*) FROM postroom_lane
         WHERE NOT paused AND (owner IS NULL OR lease_until < UTC_TIMESTAMP(6))),
       (SELECT count(*) FROM postroom_worker
         WHERE seen_at BETWEEN UTC_TIMESTAMP(6) - INTERVAL 600 SECOND
                           AND UTC_TIMESTAMP(6) - INTERVAL 15 SECOND)

-- name: measure_dead
SELECT count(*), CAST(COALESCE(sum(d.holds_key), 0) AS SIGNED)
  FROM (SELECT holds_key FROM postroom_dead_letter
         WHERE state = 'dead' AND source = 'outbox' LIMIT :most) d
