-- What SQLite says differently.

-- name: ages
SELECT (NOW_US - (SELECT created_at FROM postroom_outbox ORDER BY position LIMIT 1)) / 1000,
       (NOW_US - (SELECT created_at FROM postroom_held ORDER BY position LIMIT 1)) / 1000,
       (NOW_US - (SELECT MIN((SELECT d.deliver_at FROM postroom_delayed d WHERE d.lane = l.lane
                               ORDER BY d.deliver_at LIMIT 1)) FROM postroom_lane l)) / 1000

-- name: held_keys
SELECT (SELECT COUNT(*) FROM (SELECT 1 FROM postroom_lane l JOIN postroom_held h
                                  ON h.lane = l.lane AND h.next_attempt_at IS NOT NULL
                               LIMIT :most) h),
       (SELECT COUNT(*) FROM (SELECT holds_key FROM postroom_dead_letter
                               WHERE state = 'dead' AND source = 'outbox'
                               LIMIT :most) d WHERE d.holds_key)

-- name: workers
SELECT incarnation, kind, name, (NOW_US - seen_at) / 1000, (NOW_US - started_at) / 1000,
       seen_at / 1000, report
  FROM postroom_worker ORDER BY started_at, incarnation LIMIT 1000

-- ── verify ──────────────────────────────────────────────────────────────────────────────────────

-- name: page_outbox
SELECT lane, position, id, topic, key, size,
       length(payload) + coalesce(length(CAST(headers AS BLOB)), 0)
  FROM postroom_outbox WHERE lane = :lane AND position > :after
 ORDER BY position LIMIT :rows

-- name: page_held
SELECT lane, position, id, topic, key, size,
       length(payload) + coalesce(length(CAST(headers AS BLOB)), 0), blocked
  FROM postroom_held WHERE lane = :lane AND position > :after
 ORDER BY position LIMIT :rows

-- name: stuck_heads
SELECT h.lane, h.position, h.id, h.topic, h.key, count(*) OVER ()
  FROM postroom_held h
  LEFT JOIN (SELECT lane, topic, key, min(position) AS position FROM postroom_held
              WHERE key IS NOT NULL GROUP BY lane, topic, key) f ON f.lane = h.lane AND f.position = h.position
 WHERE h.next_attempt_at IS NULL AND NOT h.blocked
   AND (h.key IS NULL OR f.position IS NOT NULL)
 LIMIT :rows

-- name: armed_followers
SELECT h.lane, h.position, h.id, h.topic, h.key, count(*) OVER ()
  FROM postroom_held h
  LEFT JOIN (SELECT lane, topic, key, min(position) AS position FROM postroom_held
              WHERE key IS NOT NULL GROUP BY lane, topic, key) f ON f.lane = h.lane AND f.topic = h.topic AND f.key = h.key
 WHERE h.next_attempt_at IS NOT NULL AND (h.blocked OR f.position < h.position)
 LIMIT :rows

-- name: blocked_alone
SELECT h.lane, h.position, h.id, h.topic, h.key, count(*) OVER ()
  FROM postroom_held h
 WHERE h.blocked
   AND NOT EXISTS (SELECT 1 FROM postroom_dead_letter d
                    WHERE d.source = 'outbox' AND d.id = h.id AND d.position = h.position
                      AND d.state = 'dead' AND d.holds_key)
 LIMIT :rows

-- name: letter_alone
SELECT d.lane, d.position, d.id, d.topic, d.key, count(*) OVER ()
  FROM postroom_dead_letter d
 WHERE d.source = 'outbox' AND d.state = 'dead' AND d.holds_key
   AND NOT EXISTS (SELECT 1 FROM postroom_held h WHERE h.lane = d.lane
                      AND h.position = d.position AND h.id = d.id AND h.blocked)
 LIMIT :rows

-- name: queued_alone
SELECT d.lane, d.position, d.id, d.topic, d.key, count(*) OVER ()
  FROM postroom_dead_letter d
 WHERE d.source = 'outbox' AND d.state = 'queued'
   AND NOT EXISTS (SELECT 1 FROM postroom_held h WHERE h.lane = d.lane
                      AND h.position = d.position AND h.id = d.id AND NOT h.blocked)
   AND NOT EXISTS (SELECT 1 FROM postroom_outbox o WHERE o.lane = d.lane
                      AND o.position = d.position AND o.id = d.id)
 LIMIT :rows

-- name: two_places
SELECT h.lane, h.position, h.id, h.topic, h.key, count(*) OVER ()
  FROM postroom_held h
  JOIN postroom_outbox o ON o.lane = h.lane AND o.position = h.position
 LIMIT :rows

-- name: decided_and_pending
SELECT d.lane, d.position, d.id, d.topic, d.key, count(*) OVER ()
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
SELECT lane, deliver_at, id, topic, key, size,
       length(payload) + coalesce(length(CAST(headers AS BLOB)), 0)
  FROM postroom_delayed
 WHERE lane = :lane AND (deliver_at, id) > (:after, :after_id)
 ORDER BY deliver_at, id LIMIT :rows

-- name: page_letters
SELECT lane, position, id, topic, key, size,
       length(payload) + coalesce(length(CAST(headers AS BLOB)), 0), state, error_code
  FROM postroom_dead_letter
 WHERE source = 'outbox' AND (id, position) > (:after_id, :after)
 ORDER BY id, position LIMIT :rows

-- name: page_archive
-- Begins with the last id of the page before.
SELECT id FROM postroom_archive WHERE id >= :after_id ORDER BY id LIMIT :rows

-- name: reused_ids
-- First which ids stand in several rows, from the ids alone; then the contents of those few. A
-- message that was redriven stands in several rows too, with one content.
SELECT min(k.lane), min(k.position), k.id, min(k.topic), min(k.key), count(*) OVER ()
  FROM (
      SELECT lane, position, id, topic, key, type, payload FROM postroom_outbox
      UNION ALL SELECT lane, position, id, topic, key, type, payload FROM postroom_held
      UNION ALL SELECT lane, 0 AS position, id, topic, key, type, payload FROM postroom_delayed
      UNION ALL SELECT lane, position, id, topic, key, type, payload FROM postroom_archive
      UNION ALL SELECT lane, position, id, topic, key, type, payload FROM postroom_dead_letter WHERE source = 'outbox') k
 WHERE k.id IN (
     SELECT i.id FROM (
          SELECT id FROM postroom_outbox
          UNION ALL SELECT id FROM postroom_held
          UNION ALL SELECT id FROM postroom_delayed
          UNION ALL SELECT id FROM postroom_archive
          UNION ALL SELECT id FROM postroom_dead_letter WHERE source = 'outbox') i
      GROUP BY i.id HAVING count(*) > 1)
 GROUP BY k.id
HAVING count(DISTINCT k.topic || char(31) || coalesce(k.key, '') || char(31) || k.type || char(31) || hex(k.payload)) > 1
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
SELECT d.lane, d.position, min(d.id), min(d.topic), min(d.key), count(*) OVER ()
  FROM postroom_dead_letter d WHERE d.source = 'outbox'
 GROUP BY d.lane, d.position HAVING count(*) > 1
 LIMIT :rows

-- name: overdue
SELECT d.lane, 0, d.id, d.topic, d.key, count(*) OVER ()
  FROM postroom_lane l JOIN postroom_delayed d ON d.lane = l.lane
 WHERE l.owner IS NOT NULL AND l.lease_until > NOW_US AND NOT l.paused
   AND d.deliver_at < NOW_US - 60 * 1000000
 LIMIT :rows

-- name: last_position
SELECT seq FROM sqlite_sequence WHERE name = 'postroom_outbox'

-- name: now_us
SELECT NOW_US

-- name: arm_head
UPDATE postroom_held SET next_attempt_at = NOW_US
 WHERE lane = :lane AND position = :position AND next_attempt_at IS NULL AND NOT blocked

-- ── prune ───────────────────────────────────────────────────────────────────────────────────────

-- name: old_archive
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_archive
 WHERE day < date('now', '-' || :keep_seconds || ' seconds') LIMIT :most) a

-- name: old_dedup
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_dedup
 WHERE created_at < NOW_US - :keep_seconds * 1000000 LIMIT :most) a

-- name: old_dead
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_dead_letter
 WHERE state IN ('resolved', 'discarded')
   AND died_at < NOW_US - :keep_seconds * 1000000 LIMIT :most) a

-- name: old_inbox
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_inbox i
 WHERE i.handled_at < NOW_US - :keep_seconds * 1000000
   AND NOT EXISTS (SELECT 1 FROM postroom_inbox_held h
                    WHERE h.consumer = i.consumer AND h.message_id = i.message_id) LIMIT :most) a

-- name: old_keys
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_idempotency_key
 WHERE expires_at < NOW_US - :keep_seconds * 1000000
   AND (status = 'completed' OR (status = 'failed' AND (
        mode <> 'resume' OR (locked_until IS NULL AND recovery_point IS NULL)))) LIMIT :most) a

-- name: old_jobs
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_job
 WHERE state <> 'running' AND updated_at < NOW_US - :keep_seconds * 1000000 LIMIT :most) a

-- name: old_workers
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_worker
 WHERE seen_at < NOW_US - :keep_seconds * 1000000 LIMIT :most) a

-- name: prune_workers
DELETE FROM postroom_worker WHERE incarnation IN (
    SELECT incarnation FROM postroom_worker
     WHERE seen_at < NOW_US - :keep_seconds * 1000000 LIMIT :rows);
SELECT changes();

-- name: old_consumers
SELECT COUNT(*) FROM (SELECT 1 FROM postroom_consumer
 WHERE seen_at < NOW_US - :keep_seconds * 1000000 LIMIT :most) a

-- name: prune_consumers
DELETE FROM postroom_consumer WHERE name IN (
    SELECT name FROM postroom_consumer
     WHERE seen_at < NOW_US - :keep_seconds * 1000000 LIMIT :rows);
SELECT changes();

-- ── doctor ──────────────────────────────────────────────────────────────────────────────────────

-- name: server_settings
SELECT 'page_count', page_count FROM pragma_page_count
UNION ALL SELECT 'page_size', page_size FROM pragma_page_size
UNION ALL SELECT 'freelist_count', freelist_count FROM pragma_freelist_count

-- name: open_publishers
-- A file does not know who has it open.
SELECT '', '', 0, '' WHERE 0

-- name: waiting_lanes
SELECT w.lane, w.paused, (NOW_US - w.oldest) / 1000
  FROM (SELECT l.lane, l.paused,
               (SELECT o.created_at FROM postroom_outbox o WHERE o.lane = l.lane
                 ORDER BY o.position LIMIT 1) AS oldest
          FROM postroom_lane l
         WHERE l.paused OR l.owner IS NULL OR l.lease_until < NOW_US) w
 WHERE w.oldest IS NOT NULL
 ORDER BY w.lane

-- name: oldest_kept
SELECT (SELECT CAST((julianday('now') - julianday(MIN(day))) * 86400 AS INTEGER)
          FROM postroom_archive),
       (SELECT (NOW_US - MIN(created_at)) / 1000000 FROM postroom_dedup),
       (SELECT (NOW_US - MIN(handled_at)) / 1000000 FROM postroom_inbox)

-- name: ledger_in_trouble
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom_ledger
                               WHERE state = 'unknown' AND finished_at IS NOT NULL
                               LIMIT :most) u),
       (SELECT count(*) FROM (SELECT id FROM postroom_ledger
                               WHERE state IN ('accepted', 'unknown') AND finished_at IS NULL
                                 AND accepted_at < NOW_US - :age_s * 1000000
                               LIMIT :most) l
         WHERE NOT EXISTS (SELECT 1 FROM postroom_outbox o WHERE o.id = l.id)
           AND NOT EXISTS (SELECT 1 FROM postroom_held h WHERE h.id = l.id)
           AND NOT EXISTS (SELECT 1 FROM postroom_delayed d WHERE d.id = l.id)),
       (SELECT count(*) FROM (SELECT id FROM postroom_ledger
                               WHERE state = 'unknown' AND finished_at IS NULL
                                 AND accepted_at < NOW_US - :age_s * 1000000
                               LIMIT :most) a
         WHERE EXISTS (SELECT 1 FROM postroom_held h WHERE h.id = a.id))
