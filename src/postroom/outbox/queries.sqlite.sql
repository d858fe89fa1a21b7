-- What SQLite says differently. Its writers take turns (BEGIN IMMEDIATE), so no row is ever locked.
-- Times are microseconds since 1970; NOW_US stands for the present.

-- name: worker_beat
INSERT INTO postroom_worker (incarnation, kind, name, report)
VALUES (:incarnation, :kind, :worker_name, :report)
ON CONFLICT (incarnation) DO UPDATE
   SET seen_at = NOW_US, report = excluded.report

-- name: workers_live
SELECT incarnation FROM postroom_worker
 WHERE kind = :kind AND seen_at > NOW_US - :within_us
 ORDER BY incarnation

-- name: workers_forget
DELETE FROM postroom_worker WHERE seen_at < NOW_US - 86400 * 1000000

-- name: lanes_state
SELECT lane, owner, paused, lease_until - NOW_US, lease_us
  FROM postroom_lane ORDER BY lane

-- name: lanes_cap
UPDATE postroom_lane SET lease_until = NOW_US + COALESCE(lease_us, :lease_us)
 WHERE owner IS NOT NULL AND lease_until > NOW_US + COALESCE(lease_us, :lease_us)

-- name: lanes_lock_free
SELECT lane, epoch FROM postroom_lane
 WHERE lane IN (SELECT value FROM json_each(:lane_list)) AND NOT paused
   AND (owner IS NULL OR owner = :owner OR lease_until < NOW_US)
 ORDER BY lane

-- name: lanes_take
UPDATE postroom_lane
   SET owner = :owner, epoch = epoch + 1,
       lease_until = NOW_US + :lease_us, lease_us = :lease_us
 WHERE lane IN (SELECT value FROM json_each(:lane_list))

-- name: lanes_renew
UPDATE postroom_lane
   SET lease_until = NOW_US + :lease_us, lease_us = :lease_us
 WHERE owner = :owner;
SELECT lane, epoch, paused FROM postroom_lane WHERE owner = :owner;

-- name: lanes_release
UPDATE postroom_lane SET owner = NULL, lease_until = NULL
 WHERE owner = :owner AND epoch * 16 + lane IN (SELECT value FROM json_each(:fence_list))

-- name: lanes_notice
SELECT l.lane, l.paused, EXISTS (SELECT 1 FROM postroom_held h WHERE h.lane = l.lane)
  FROM postroom_lane l WHERE l.lane IN (SELECT value FROM json_each(:lane_list))

-- name: lane_sizes
-- How far a read of this lane may go: sizes first, since the payloads must fit in memory.
SELECT position, size FROM postroom_outbox
 WHERE lane = :lane AND position > :after ORDER BY position LIMIT :rows

-- name: read_lane
SELECT o.lane, o.position, o.id, o.topic, o.key, o.type, o.aggregate_type, o.aggregate_id,
       o.content_type, o.headers, o.payload, o.size, o.redrives, o.created_at,
       COALESCE(o.expires_at <= NOW_US, 0),
       CASE WHEN :probe = 1 AND EXISTS (
           SELECT 1 FROM postroom_held h
            WHERE h.lane = o.lane AND h.topic = o.topic AND h.key = o.key) THEN 1 ELSE 0 END,
       0, NULL
  FROM postroom_outbox o
 WHERE o.lane = :lane AND o.position > :after AND o.position <= :upto
 ORDER BY o.position LIMIT :rows

-- name: held_due
SELECT m.lane, m.position, m.id, m.topic, m.key, m.type, m.aggregate_type, m.aggregate_id,
       m.content_type, m.headers, m.payload, m.size, m.redrives, m.created_at,
       COALESCE(m.expires_at <= NOW_US, 0), 1, m.attempts, m.history
  FROM (SELECT h.*, SUM(h.size) OVER (ORDER BY h.next_attempt_at, h.position) AS running
          FROM (SELECT * FROM postroom_held
                 WHERE lane = :lane AND next_attempt_at <= NOW_US
                 ORDER BY next_attempt_at, position LIMIT :rows) h) m
 WHERE m.running - m.size < :bytes
 ORDER BY m.position

-- name: held_run
SELECT m.lane, m.position, m.id, m.topic, m.key, m.type, m.aggregate_type, m.aggregate_id,
       m.content_type, m.headers, m.payload, m.size, m.redrives, m.created_at,
       COALESCE(m.expires_at <= NOW_US, 0), 1, m.attempts, m.history
  FROM (SELECT h.*, SUM(h.size) OVER (ORDER BY h.position) AS running,
               SUM(h.blocked) OVER (ORDER BY h.position) AS stopped
          FROM (SELECT * FROM postroom_held
                 WHERE lane = :lane AND topic = :topic AND key = :key
                 ORDER BY position LIMIT :rows) h) m
 WHERE m.running - m.size < :bytes AND m.stopped = 0
 ORDER BY m.position

-- name: journal_read
SELECT incarnation, batch, lo, hi, messages, alone, held FROM postroom_lane_batch
 WHERE lane = :lane ORDER BY lo, incarnation, batch

-- name: fence
SELECT lane FROM postroom_lane
 WHERE owner = :owner AND epoch * 16 + lane IN (SELECT value FROM json_each(:fence_list))
 ORDER BY lane

-- name: journal_write
SELECT lane FROM postroom_lane
 WHERE owner = :owner AND epoch * 16 + lane IN (SELECT value FROM json_each(:fence_list))
 ORDER BY lane;
INSERT INTO postroom_lane_batch (lane, incarnation, batch, lo, hi, messages, alone, held)
SELECT json_extract(w.value, '$.lane'), :owner, json_extract(w.value, '$.batch'),
       json_extract(w.value, '$.lo'), json_extract(w.value, '$.hi'),
       json_extract(w.value, '$.messages'), json_extract(w.value, '$.alone'),
       json_extract(w.value, '$.held')
  FROM json_each(:entries) w
 WHERE json_extract(w.value, '$.lane') IN (
       SELECT l.lane FROM postroom_lane l
        WHERE l.owner = :owner
          AND l.epoch * 16 + l.lane IN (SELECT value FROM json_each(:fence_list)));

-- name: journal_clear
DELETE FROM postroom_lane_batch
 WHERE incarnation = :owner AND lane IN (SELECT value FROM json_each(:lane_list))
   AND batch IN (SELECT value FROM json_each(:batch_list))

-- name: journal_acquit
DELETE FROM postroom_lane_batch
 WHERE lane = :lane AND lo = :position AND hi = lo AND (alone OR :late = 1)

-- name: outbox_archive
INSERT INTO postroom_archive (day, id, lane, position, topic, key, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, redrives, attempts, created_at,
       delivered_at)
SELECT date('now'), s.id, s.lane, s.position, s.topic, s.key, s.type, s.aggregate_type,
       s.aggregate_id, s.content_type, s.headers, s.payload, s.size, s.redrives, 1, s.created_at,
       NOW_US
  FROM postroom_outbox s WHERE s.position IN (SELECT value FROM json_each(:position_list))
 ON CONFLICT DO NOTHING

-- name: outbox_delete
DELETE FROM postroom_outbox
 WHERE position IN (SELECT value FROM json_each(:position_list));
SELECT changes();

-- name: held_archive
INSERT INTO postroom_archive (day, id, lane, position, topic, key, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, redrives, attempts, created_at,
       delivered_at)
SELECT date('now'), s.id, s.lane, s.position, s.topic, s.key, s.type, s.aggregate_type,
       s.aggregate_id, s.content_type, s.headers, s.payload, s.size, s.redrives, s.attempts + 1,
       s.created_at,
       NOW_US
  FROM postroom_held s WHERE s.position IN (SELECT value FROM json_each(:position_list))
 ON CONFLICT DO NOTHING

-- name: held_delete
DELETE FROM postroom_held
 WHERE position IN (SELECT value FROM json_each(:position_list));
SELECT changes();

-- name: hold
INSERT INTO postroom_held (lane, position, id, topic, key, type, aggregate_type, aggregate_id,
       content_type, headers, payload, size, redrives, created_at, expires_at)
SELECT lane, position, id, topic, key, type, aggregate_type, aggregate_id,
       content_type, headers, payload, size, redrives, created_at, expires_at
  FROM postroom_outbox WHERE position IN (SELECT value FROM json_each(:position_list));
DELETE FROM postroom_outbox WHERE position IN (SELECT value FROM json_each(:position_list));

-- name: hold_failed
UPDATE postroom_held
   SET attempts = :attempts, history = :history, error_code = :error_code, error = :error,
       next_attempt_at = coalesce(min(expires_at, NOW_US + :delay_us), NOW_US + :delay_us)
 WHERE lane = :lane AND position = :position

-- name: hold_later
UPDATE postroom_held
   SET next_attempt_at = coalesce(min(expires_at, NOW_US + :delay_us), NOW_US + :delay_us)
 WHERE position IN (SELECT value FROM json_each(:position_list))

-- name: heads_arm
UPDATE postroom_held
   SET next_attempt_at = NOW_US + :delay_us
 WHERE next_attempt_at IS NULL AND NOT blocked AND position IN (
       SELECT (SELECT f.position FROM postroom_held f
                WHERE f.lane = json_extract(w.value, '$.lane')
                  AND f.topic = json_extract(w.value, '$.topic')
                  AND f.key = json_extract(w.value, '$.key')
                ORDER BY f.position LIMIT 1)
         FROM json_each(:keys) w)

-- name: bury
INSERT INTO postroom_dead_letter (source, id, lane, position, topic, key, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, created_at, expires_at, state, holds_key,
       error_code, error, attempts, history, redrives,
       died_at)
SELECT 'outbox', h.id, h.lane, h.position, h.topic, h.key, h.type, h.aggregate_type,
       h.aggregate_id, h.content_type, h.headers, h.payload, h.size, h.created_at, h.expires_at,
       :state, :holds_key,
       :error_code, :error, :attempts, :history, h.redrives,
       NOW_US
  FROM postroom_held h WHERE h.lane = :lane AND h.position = :position
ON CONFLICT (source, id, position) DO UPDATE
   SET state = excluded.state,
       holds_key = excluded.holds_key,
       error_code = excluded.error_code,
       error = excluded.error,
       attempts = excluded.attempts,
       history = excluded.history,
       redrives = excluded.redrives,
       died_at = excluded.died_at

-- name: held_block
UPDATE postroom_held
   SET blocked = 1, next_attempt_at = NULL, attempts = :attempts, history = :history,
       error_code = :error_code, error = :error
 WHERE lane = :lane AND position = :position

-- name: redriven_resolve
UPDATE postroom_dead_letter
   SET state = 'resolved', ended_at = NOW_US
 WHERE source = 'outbox' AND id = :id AND position = :position AND state = 'queued'

-- name: delayed_lanes
SELECT l.lane FROM postroom_lane l
 WHERE l.lane IN (SELECT value FROM json_each(:lane_list)) AND EXISTS (
           SELECT 1 FROM postroom_delayed d WHERE d.lane = l.lane AND d.deliver_at <= NOW_US)

-- name: delayed_due
SELECT lane, deliver_at, id FROM postroom_delayed
 WHERE lane = :lane AND deliver_at <= NOW_US
 ORDER BY deliver_at, id LIMIT :rows

-- name: promote
INSERT INTO postroom_outbox (lane, id, topic, key, type, aggregate_type, aggregate_id,
       content_type, headers, payload, size, created_at, expires_at)
SELECT d.lane, d.id, d.topic, d.key, d.type, d.aggregate_type, d.aggregate_id, d.content_type,
       d.headers, d.payload, d.size, d.created_at, d.expires_at
  FROM json_each(:entries) w
 CROSS JOIN postroom_delayed d
    ON d.lane = json_extract(w.value, '$.lane')
   AND d.deliver_at = json_extract(w.value, '$.deliver_at')
   AND d.id = json_extract(w.value, '$.id')
 ORDER BY d.deliver_at, d.id;
DELETE FROM postroom_delayed WHERE rowid IN (
    SELECT d.rowid FROM json_each(:entries) w
     CROSS JOIN postroom_delayed d
     WHERE d.lane = json_extract(w.value, '$.lane')
       AND d.deliver_at = json_extract(w.value, '$.deliver_at')
       AND d.id = json_extract(w.value, '$.id'));

-- name: archive_days
SELECT 0

-- name: archive_overflow
SELECT 0

-- name: prune_archive
DELETE FROM postroom_archive WHERE rowid IN (
    SELECT rowid FROM postroom_archive
     WHERE day < date('now', '-' || :keep_seconds || ' seconds') LIMIT :rows);
SELECT changes();

-- name: prune_dedup
DELETE FROM postroom_dedup WHERE dedup_key IN (
    SELECT dedup_key FROM postroom_dedup
     WHERE created_at < NOW_US - :keep_seconds * 1000000
     ORDER BY created_at LIMIT :rows);
SELECT changes();

-- name: prune_dead
DELETE FROM postroom_dead_letter WHERE (source, id, position) IN (
    SELECT source, id, position FROM postroom_dead_letter
     WHERE state IN ('resolved', 'discarded')
       AND died_at < NOW_US - :keep_seconds * 1000000
     ORDER BY died_at LIMIT :rows);
SELECT changes();

-- name: prune_overflow
SELECT 0

-- name: prune_inbox
DELETE FROM postroom_inbox WHERE (consumer, message_id) IN (
    SELECT i.consumer, i.message_id FROM postroom_inbox i
     WHERE i.handled_at < NOW_US - :keep_seconds * 1000000
       AND NOT EXISTS (SELECT 1 FROM postroom_inbox_held h
                        WHERE h.consumer = i.consumer AND h.message_id = i.message_id)
     ORDER BY i.handled_at LIMIT :rows);
SELECT changes();

-- name: prune_keys
DELETE FROM postroom_idempotency_key WHERE (scope, operation, key) IN (
    SELECT scope, operation, key FROM postroom_idempotency_key
     WHERE expires_at < NOW_US - :keep_seconds * 1000000
       AND (status = 'completed' OR (status = 'failed' AND (
            mode <> 'resume' OR (locked_until IS NULL AND recovery_point IS NULL))))
     ORDER BY expires_at LIMIT :rows);
SELECT changes();

-- name: prune_jobs
-- Jobs first, then items: when no item is left to delete, no job is left either.
DELETE FROM postroom_job
 WHERE state <> 'running' AND updated_at < NOW_US - :keep_seconds * 1000000
   AND NOT EXISTS (SELECT 1 FROM postroom_job_item i WHERE i.job = postroom_job.id);
DELETE FROM postroom_job_item WHERE (job, id, position) IN (
    SELECT i.job, i.id, i.position FROM postroom_job_item i JOIN postroom_job j ON j.id = i.job
     WHERE j.state <> 'running' AND j.updated_at < NOW_US - :keep_seconds * 1000000 LIMIT :rows);
SELECT changes();

-- name: clock
SELECT NOW_US

-- name: measure_lane
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom_outbox o
                               WHERE o.lane = :lane AND o.position > :after LIMIT :most) p),
       (SELECT count(*) FROM (SELECT 1 FROM postroom_held h
                               WHERE h.lane = :lane AND h.next_attempt_at IS NOT NULL
                               LIMIT :most) n),
       (SELECT (NOW_US - o.created_at) / 1000
          FROM postroom_outbox o WHERE o.lane = :lane AND o.position > :after
         ORDER BY o.position LIMIT 1),
       (SELECT (NOW_US - d.deliver_at) / 1000
          FROM postroom_delayed d WHERE d.lane = :lane AND d.deliver_at <= NOW_US
         ORDER BY d.deliver_at LIMIT 1)

-- name: measure_held
-- Of all lanes at once: by position there is one index for all of them.
SELECT (NOW_US - min(f.created_at)) / 1000
  FROM (SELECT created_at, blocked FROM postroom_held ORDER BY position LIMIT 3200) f
 WHERE NOT f.blocked

-- name: measure_outbox
-- An upper limit: what has left from between counts too.
SELECT (SELECT max(position) FROM postroom_outbox) - (SELECT min(position) FROM postroom_outbox) + 1

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
         WHERE NOT paused AND (owner IS NULL OR lease_until < NOW_US)),
       (SELECT count(*) FROM postroom_worker
         WHERE seen_at BETWEEN NOW_US - 600 * 1000000 AND NOW_US - 15 * 1000000)

-- name: measure_dead
SELECT count(*), COALESCE(sum(d.holds_key), 0)
  FROM (SELECT holds_key FROM postroom_dead_letter
         WHERE state = 'dead' AND source = 'outbox' LIMIT :most) d
