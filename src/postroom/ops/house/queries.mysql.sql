-- What MariaDB says differently.

-- name: ages
SELECT TIMESTAMPDIFF(MICROSECOND, MIN((SELECT o.created_at FROM postroom_outbox o
        WHERE o.lane = l.lane ORDER BY o.position LIMIT 1)), UTC_TIMESTAMP(6)) DIV 1000,
       TIMESTAMPDIFF(MICROSECOND, MIN((SELECT h.created_at FROM postroom_held h
        WHERE h.lane = l.lane ORDER BY h.position LIMIT 1)), UTC_TIMESTAMP(6)) DIV 1000,
       TIMESTAMPDIFF(MICROSECOND, MIN((SELECT d.deliver_at FROM postroom_delayed d
        WHERE d.lane = l.lane ORDER BY d.deliver_at, d.id LIMIT 1)), UTC_TIMESTAMP(6)) DIV 1000
  FROM postroom_lane l

-- name: held_keys
-- Lane by lane through the index, or all that waits behind the heads would be read too.
SELECT (SELECT COUNT(*) FROM (
            SELECT 1 FROM postroom_lane l
              STRAIGHT_JOIN postroom_held h FORCE INDEX (held_due)
                 ON h.lane = l.lane AND h.next_attempt_at > '1970-01-01' LIMIT :most) h),
       (SELECT COUNT(*) FROM (SELECT holds_key FROM postroom_dead_letter
                               WHERE state = 'dead' AND source = 'outbox'
                               LIMIT :most) d WHERE d.holds_key)

-- name: workers
SELECT incarnation, kind, name, TIMESTAMPDIFF(MICROSECOND, seen_at, UTC_TIMESTAMP(6)) DIV 1000,
       TIMESTAMPDIFF(MICROSECOND, started_at, UTC_TIMESTAMP(6)) DIV 1000,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', seen_at) DIV 1000, report
  FROM postroom_worker ORDER BY started_at, incarnation LIMIT 1000

-- ── verify ──────────────────────────────────────────────────────────────────────────────────────

-- name: page_outbox
SELECT lane, position, id, topic, `key`, size,
       octet_length(payload) + coalesce(octet_length(headers), 0)
  FROM postroom_outbox WHERE lane = :lane AND position > :after
 ORDER BY position LIMIT :rows

-- name: page_held
SELECT lane, position, id, topic, `key`, size,
       octet_length(payload) + coalesce(octet_length(headers), 0), blocked
  FROM postroom_held WHERE lane = :lane AND position > :after
 ORDER BY position LIMIT :rows

-- name: stuck_heads
SELECT h.lane, h.position, h.id, h.topic, h.`key`, count(*) OVER ()
  FROM postroom_held h
  LEFT JOIN (SELECT lane, topic, `key`, min(position) AS position FROM postroom_held
              WHERE `key` IS NOT NULL GROUP BY lane, topic, `key`) f ON f.lane = h.lane AND f.position = h.position
 WHERE h.next_attempt_at IS NULL AND NOT h.blocked
   AND (h.`key` IS NULL OR f.position IS NOT NULL)
 LIMIT :rows

-- name: armed_followers
SELECT h.lane, h.position, h.id, h.topic, h.`key`, count(*) OVER ()
  FROM postroom_held h
  LEFT JOIN (SELECT lane, topic, `key`, min(position) AS position FROM postroom_held
              WHERE `key` IS NOT NULL GROUP BY lane, topic, `key`) f ON f.lane = h.lane AND f.topic = h.topic AND f.`key` = h.`key`
 WHERE h.next_attempt_at IS NOT NULL AND (h.blocked OR f.position < h.position)
 LIMIT :rows

-- name: blocked_alone
SELECT h.lane, h.position, h.id, h.topic, h.`key`, count(*) OVER ()
  FROM postroom_held h
 WHERE h.blocked
   AND NOT EXISTS (SELECT 1 FROM postroom_dead_letter d
                    WHERE d.source = 'outbox' AND d.id = h.id AND d.position = h.position
                      AND d.state = 'dead' AND d.holds_key)
 LIMIT :rows

-- name: letter_alone
SELECT d.lane, d.position, d.id, d.topic, d.`key`, count(*) OVER ()
  FROM postroom_dead_letter d
 WHERE d.source = 'outbox' AND d.state = 'dead' AND d.holds_key
   AND NOT EXISTS (SELECT 1 FROM postroom_held h WHERE h.lane = d.lane
                      AND h.position = d.position AND h.id = d.id AND h.blocked)
 LIMIT :rows

-- name: queued_alone
SELECT d.lane, d.position, d.id, d.topic, d.`key`, count(*) OVER ()
  FROM postroom_dead_letter d
 WHERE d.source = 'outbox' AND d.state = 'queued'
   AND NOT EXISTS (SELECT 1 FROM postroom_held h WHERE h.lane = d.lane
                      AND h.position = d.position AND h.id = d.id AND NOT h.blocked)
   AND NOT EXISTS (SELECT 1 FROM postroom_outbox o WHERE o.lane = d.lane
                      AND o.position = d.position AND o.id = d.id)
 LIMIT :rows

-- name: two_places
SELECT h.lane, h.position, h.id, h.topic, h.`key`, count(*) OVER ()
  FROM postroom_held h
  JOIN postroom_outbox o ON o.lane = h.lane AND o.position = h.position
 LIMIT :rows

-- name: decided_and_pending
SELECT d.lane, d.position, d.id, d.topic, d.`key`, count(*) OVER ()
  FROM postroom_dead_letter d
  JOIN postroom_outbox o ON o.lane = d.lane AND o.position = d.position AND o.id = d.id
 WHERE d.source = 'outbox' AND d.state <> 'queued'
 LIMIT :rows

-- name: stale_journal
SELECT b.lane, b.lo, b.incarnation, '', NULL, count(*) OVER ()
  FROM postroom_lane_batch b
 WHERE NOT EXISTS (SELECT 1 FROM postroom_worker w WHERE w.incarnation = b.incarnation)
   AND NOT EXISTS (SELECT 1 FROM postroom_lane l
                    WHERE l.lane = b.lane AND l.owner = b.incarnation)
   AND NOT EXISTS (SELECT 1 FROM postroom_outbox o
                    WHERE o.lane = b.lane AND o.position BETWEEN b.lo AND b.hi)
   AND NOT EXISTS (SELECT 1 FROM postroom_held h
                    WHERE h.lane = b.lane AND h.position BETWEEN b.lo AND b.hi)
 LIMIT :rows

-- name: page_delayed
SELECT lane, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', deliver_at), id, topic, `key`, size,
       octet_length(payload) + coalesce(octet_length(headers), 0)
  FROM postroom_delayed
 WHERE lane = :lane
   AND deliver_at >= TIMESTAMP('1970-01-01') + INTERVAL :after MICROSECOND
   AND (deliver_at > TIMESTAMP('1970-01-01') + INTERVAL :after MICROSECOND OR id > :after_id)
 ORDER BY deliver_at, id LIMIT :rows

-- name: page_letters
SELECT lane, position, id, topic, `key`, size,
       octet_length(payload) + coalesce(octet_length(headers), 0), state, error_code
  FROM postroom_dead_letter
 WHERE source = 'outbox' AND id >= :after_id AND (id > :after_id OR position > :after)
 ORDER BY id, position LIMIT :rows

-- name: page_archive
-- Begins with the last id of the page before.
SELECT id FROM postroom_archive WHERE id >= :after_id ORDER BY id LIMIT :rows

-- name: reused_ids
-- First which ids stand in several rows, from the ids alone; then the contents of those few. A
-- message that was redriven stands in several rows too, with one content.
SELECT min(k.lane), min(k.position), k.id, min(k.topic), min(k.`key`), count(*) OVER ()
  FROM (
      SELECT lane, position, id, topic, `key`, type, payload FROM postroom_outbox
      UNION ALL SELECT lane, position, id, topic, `key`, type, payload FROM postroom_held
      UNION ALL SELECT lane, 0 AS position, id, topic, `key`, type, payload FROM postroom_delayed
      UNION ALL SELECT lane, position, id, topic, `key`, type, payload FROM postroom_archive
      UNION ALL SELECT lane, position, id, topic, `key`, type, payload FROM postroom_dead_letter WHERE source = 'outbox') k
 WHERE k.id IN (
     SELECT i.id FROM (
          SELECT id FROM postroom_outbox
          UNION ALL SELECT id FROM postroom_held
          UNION ALL SELECT id FROM postroom_delayed
          UNION ALL SELECT id FROM postroom_archive
          UNION ALL SELECT id FROM postroom_dead_letter WHERE source = 'outbox') i
      GROUP BY i.id HAVING count(*) > 1)
 GROUP BY k.id
HAVING COUNT(DISTINCT k.topic, COALESCE(k.`key`, ''), k.type, MD5(k.payload)) > 1
 LIMIT :rows

-- name: reused_waiting
-- The same among messages that wait, as far as a quick look goes.
SELECT count(*) FROM (
    SELECT i.id FROM (
        SELECT id FROM (SELECT id FROM postroom_outbox LIMIT :most) o
        UNION ALL SELECT id FROM (SELECT id FROM postroom_held LIMIT :most) h
        UNION ALL SELECT id FROM (SELECT id FROM postroom_delayed LIMIT :most) d) i
     GROUP BY i.id HAVING count(*) > 1) r

-- name: two_letters
SELECT d.lane, d.position, min(d.id), min(d.topic), min(d.`key`), count(*) OVER ()
  FROM postroom_dead_letter d WHERE d.source = 'outbox'
 GROUP BY d.lane, d.position HAVING count(*) > 1
 LIMIT :rows

-- name: overdue
SELECT d.lane, 0, d.id, d.topic, d.`key`, count(*) OVER ()
  FROM postroom_lane l JOIN postroom_delayed d ON d.lane = l.lane
 WHERE l.owner IS NOT NULL AND l.lease_until > UTC_TIMESTAMP(6) AND NOT l.paused
   AND d.deliver_at < UTC_TIMESTAMP(6) - INTERVAL 60 SECOND
 LIMIT :rows

-- name: last_position
SELECT CAST(AUTO_INCREMENT AS SIGNED) - 1 FROM information_schema.tables
 WHERE table_schema = DATABASE() AND table_name = 'postroom_outbox'

-- name: now_us
SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))

-- name: arm_head
UPDATE postroom_held SET next_attempt_at = UTC_TIMESTAMP(6)
 WHERE lane = :lane AND position = :position AND next_attempt_at IS NULL AND NOT blocked

-- name: is_head
SELECT 1 FROM postroom_held h
 WHERE h.lane = :lane AND h.position = :position
   AND NOT EXISTS (SELECT 1 FROM postroom_held f WHERE f.lane = h.lane AND f.topic = h.topic
                      AND f.`key` = h.`key` AND f.position < h.position)

-- ── prune ───────────────────────────────────────────────────────────────────────────────────────

-- name: old_archive
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_archive
 WHERE day < DATE(UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND) LIMIT :most) a

-- name: old_dedup
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_dedup
 WHERE created_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND LIMIT :most) a

-- name: old_dead
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_dead_letter
 WHERE state IN ('resolved', 'discarded')
   AND died_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND LIMIT :most) a

-- name: old_inbox
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_inbox i
 WHERE i.handled_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND
   AND NOT EXISTS (SELECT 1 FROM postroom_inbox_held h
                    WHERE h.consumer = i.consumer AND h.message_id = i.message_id) LIMIT :most) a

-- name: old_keys
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_idempotency_key
 WHERE expires_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND
   AND (status = 'completed' OR (status = 'failed' AND (
        mode <> 'resume' OR (locked_until IS NULL AND recovery_point IS NULL)))) LIMIT :most) a

-- name: old_jobs
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_job
 WHERE state <> 'running'
   AND updated_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND LIMIT :most) a

-- name: old_workers
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_worker
 WHERE seen_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND LIMIT :most) a

-- name: prune_workers
DELETE FROM postroom_worker WHERE seen_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND
 LIMIT :rows;
SELECT ROW_COUNT();

-- name: old_consumers
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_consumer
 WHERE seen_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND LIMIT :most) a

-- name: prune_consumers
DELETE FROM postroom_consumer WHERE seen_at < UTC_TIMESTAMP(6) - INTERVAL :keep_seconds SECOND
 LIMIT :rows;
SELECT ROW_COUNT();

-- ── doctor ──────────────────────────────────────────────────────────────────────────────────────

-- name: server_settings
SELECT LOWER(variable_name), variable_value FROM information_schema.global_variables
 WHERE variable_name IN ('binlog_format', 'log_bin', 'innodb_flush_log_at_trx_commit', 'sync_binlog',
                         'tx_isolation', 'transaction_isolation', 'max_allowed_packet',
                         'wait_timeout', 'max_connections')

-- name: open_publishers
SELECT CAST(t.trx_mysql_thread_id AS CHAR), p.user,
       TIMESTAMPDIFF(SECOND, t.trx_started, NOW()), LOWER(p.command)
  FROM information_schema.innodb_trx t
  JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
 WHERE t.trx_mysql_thread_id <> CONNECTION_ID()
   AND (t.trx_rows_modified > 0 OR t.trx_rows_locked > 0)
 ORDER BY t.trx_started LIMIT 20

-- name: waiting_lanes
SELECT w.lane, w.paused, TIMESTAMPDIFF(MICROSECOND, w.oldest, UTC_TIMESTAMP(6)) DIV 1000
  FROM (SELECT l.lane, l.paused,
               (SELECT o.created_at FROM postroom_outbox o WHERE o.lane = l.lane
                 ORDER BY o.position LIMIT 1) AS oldest
          FROM postroom_lane l
         WHERE l.paused OR l.owner IS NULL OR l.lease_until < UTC_TIMESTAMP(6)) w
 WHERE w.oldest IS NOT NULL
 ORDER BY w.lane

-- name: oldest_kept
SELECT (SELECT TIMESTAMPDIFF(SECOND, MIN(day), UTC_TIMESTAMP()) FROM postroom_archive),
       (SELECT TIMESTAMPDIFF(SECOND, MIN(created_at), UTC_TIMESTAMP()) FROM postroom_dedup),
       (SELECT TIMESTAMPDIFF(SECOND, MIN(handled_at), UTC_TIMESTAMP()) FROM postroom_inbox)

-- name: ledger_in_trouble
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom_ledger
                               WHERE state = 'unknown' AND finished_at IS NOT NULL
                               LIMIT :most) u),
       (SELECT count(*) FROM (SELECT id FROM postroom_ledger
                               WHERE state IN ('accepted', 'unknown') AND finished_at IS NULL
                                 AND accepted_at < UTC_TIMESTAMP(6) - INTERVAL :age_s SECOND
                               LIMIT :most) l
         WHERE NOT EXISTS (SELECT 1 FROM postroom_outbox o WHERE o.id = l.id)
           AND NOT EXISTS (SELECT 1 FROM postroom_held h WHERE h.id = l.id)
           AND NOT EXISTS (SELECT 1 FROM postroom_delayed d WHERE d.id = l.id)),
       (SELECT count(*) FROM (SELECT id FROM postroom_ledger
                               WHERE state = 'unknown' AND finished_at IS NULL
                                 AND accepted_at < UTC_TIMESTAMP(6) - INTERVAL :age_s SECOND
                               LIMIT :most) a
         WHERE EXISTS (SELECT 1 FROM postroom_held h WHERE h.id = a.id))
