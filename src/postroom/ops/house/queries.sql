-- What those who look after the house ask. What is asked often is bounded or goes by an index.

-- ── status ──────────────────────────────────────────────────────────────────────────────────────

-- name: ages
-- Milliseconds since the oldest pending and the oldest held message were published, and by how much
-- the first delayed message is overdue. The first of each lane is its oldest.
SELECT CAST(extract(epoch FROM clock_timestamp() - min(o.created_at)) * 1000 AS bigint),
       CAST(extract(epoch FROM clock_timestamp() - min(h.created_at)) * 1000 AS bigint),
       CAST(extract(epoch FROM clock_timestamp() - min(d.deliver_at)) * 1000 AS bigint)
  FROM postroom.lane l
  LEFT JOIN LATERAL (SELECT created_at FROM postroom.outbox
                      WHERE lane = l.lane ORDER BY position LIMIT 1) o ON true
  LEFT JOIN LATERAL (SELECT created_at FROM postroom.held
                      WHERE lane = l.lane ORDER BY position LIMIT 1) h ON true
  LEFT JOIN LATERAL (SELECT deliver_at FROM postroom.delayed
                      WHERE lane = l.lane ORDER BY deliver_at, id LIMIT 1) d ON true

-- name: held_keys
-- Keys that wait for the next attempt of their head, and keys that a dead letter holds.
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom.held WHERE next_attempt_at IS NOT NULL
                               LIMIT CAST(:most AS bigint)) h),
       (SELECT count(*) FROM (SELECT holds_key FROM postroom.dead_letter
                               WHERE state = 'dead' AND source = 'outbox'
                               LIMIT CAST(:most AS bigint)) d WHERE d.holds_key)

-- name: workers
SELECT incarnation, kind, name,
       CAST(extract(epoch FROM clock_timestamp() - seen_at) * 1000 AS bigint),
       CAST(extract(epoch FROM clock_timestamp() - started_at) * 1000 AS bigint),
       CAST(extract(epoch FROM seen_at) * 1000 AS bigint), report
  FROM postroom.worker ORDER BY started_at, incarnation LIMIT 1000

-- name: topics_in_use
-- Of the first messages of each table: enough for a look, however long the tables are.
SELECT topic FROM (SELECT topic FROM postroom.outbox LIMIT 1000) o
 UNION SELECT topic FROM (SELECT topic FROM postroom.held LIMIT 1000) h
 UNION SELECT topic FROM (SELECT topic FROM postroom.delayed LIMIT 1000) d
 UNION SELECT topic FROM (SELECT topic FROM postroom.archive LIMIT 1000) a

-- ── verify: all of it in one snapshot, tables a page at a time ──────────────────────────────────

-- name: totals
SELECT (SELECT count(*) FROM postroom.outbox), (SELECT count(*) FROM postroom.delayed),
       (SELECT count(*) FROM postroom.held WHERE NOT blocked),
       (SELECT count(*) FROM postroom.held WHERE blocked),
       (SELECT count(*) FROM postroom.archive)

-- name: letter_totals
SELECT CASE WHEN state = 'resolved' AND error_code = 'expired' THEN 'expired' ELSE state END,
       count(*)
  FROM postroom.dead_letter WHERE source = 'outbox' GROUP BY 1

-- name: page_outbox
SELECT lane, position, CAST(id AS text), topic, key, size,
       octet_length(payload) + coalesce(octet_length(headers), 0)
  FROM postroom.outbox WHERE lane = :lane AND position > CAST(:after AS bigint)
 ORDER BY position LIMIT CAST(:rows AS bigint)

-- name: page_held
SELECT lane, position, CAST(id AS text), topic, key, size,
       octet_length(payload) + coalesce(octet_length(headers), 0), CAST(blocked AS int)
  FROM postroom.held WHERE lane = :lane AND position > CAST(:after AS bigint)
 ORDER BY position LIMIT CAST(:rows AS bigint)

-- name: page_delayed
SELECT lane, CAST(extract(epoch FROM deliver_at) * 1000000 AS bigint), CAST(id AS text), topic, key,
       size, octet_length(payload) + coalesce(octet_length(headers), 0)
  FROM postroom.delayed
 WHERE lane = :lane
   AND (deliver_at, id) > (timestamptz 'epoch' + CAST(:after AS bigint) * interval '1 microsecond',
                           CAST(CAST(:after_id AS text) AS uuid))
 ORDER BY deliver_at, id LIMIT CAST(:rows AS bigint)

-- name: page_letters
SELECT lane, position, CAST(id AS text), topic, key, size,
       octet_length(payload) + coalesce(octet_length(headers), 0), state, error_code
  FROM postroom.dead_letter
 WHERE source = 'outbox'
   AND (id, position) > (CAST(CAST(:after_id AS text) AS uuid), CAST(:after AS bigint))
 ORDER BY id, position LIMIT CAST(:rows AS bigint)

-- name: page_archive
-- A range of blocks of each day: PostgreSQL's archive has no index in the order of ids.
SELECT CAST(id AS text) FROM postroom.archive
 WHERE ctid >= CAST('(' || CAST(:block AS bigint) || ',0)' AS tid)
   AND ctid < CAST('(' || CAST(:block AS bigint) + CAST(:blocks AS bigint) || ',0)' AS tid)

-- name: stuck_heads
-- The first of its key, and nothing says when it is tried: it and its key wait for ever. Found by
-- grouping: to look for an earlier one of each row would be slow where many wait behind one key.
SELECT h.lane, h.position, CAST(h.id AS text), h.topic, h.key, count(*) OVER ()
  FROM postroom.held h
  LEFT JOIN (SELECT lane, topic, key, min(position) AS position FROM postroom.held
              WHERE key IS NOT NULL GROUP BY lane, topic, key) f ON f.lane = h.lane AND f.position = h.position
 WHERE h.next_attempt_at IS NULL AND NOT h.blocked
   AND (h.key IS NULL OR f.position IS NOT NULL)
 LIMIT CAST(:rows AS bigint)

-- name: armed_followers
-- It would be tried though an earlier one of its key waits, or though it is a dead letter.
SELECT h.lane, h.position, CAST(h.id AS text), h.topic, h.key, count(*) OVER ()
  FROM postroom.held h
  LEFT JOIN (SELECT lane, topic, key, min(position) AS position FROM postroom.held
              WHERE key IS NOT NULL GROUP BY lane, topic, key) f ON f.lane = h.lane AND f.topic = h.topic AND f.key = h.key
 WHERE h.next_attempt_at IS NOT NULL AND (h.blocked OR f.position < h.position)
 LIMIT CAST(:rows AS bigint)

-- name: blocked_alone
SELECT h.lane, h.position, CAST(h.id AS text), h.topic, h.key, count(*) OVER ()
  FROM postroom.held h
 WHERE h.blocked
   AND NOT EXISTS (SELECT 1 FROM postroom.dead_letter d
                    WHERE d.source = 'outbox' AND d.id = h.id AND d.position = h.position
                      AND d.state = 'dead' AND d.holds_key)
 LIMIT CAST(:rows AS bigint)

-- name: letter_alone
SELECT d.lane, d.position, CAST(d.id AS text), d.topic, d.key, count(*) OVER ()
  FROM postroom.dead_letter d
 WHERE d.source = 'outbox' AND d.state = 'dead' AND d.holds_key
   AND NOT EXISTS (SELECT 1 FROM postroom.held h WHERE h.lane = d.lane
                      AND h.position = d.position AND h.id = d.id AND h.blocked)
 LIMIT CAST(:rows AS bigint)

-- name: queued_alone
SELECT d.lane, d.position, CAST(d.id AS text), d.topic, d.key, count(*) OVER ()
  FROM postroom.dead_letter d
 WHERE d.source = 'outbox' AND d.state = 'queued'
   AND NOT EXISTS (SELECT 1 FROM postroom.held h WHERE h.lane = d.lane
                      AND h.position = d.position AND h.id = d.id AND NOT h.blocked)
   AND NOT EXISTS (SELECT 1 FROM postroom.outbox o WHERE o.lane = d.lane
                      AND o.position = d.position AND o.id = d.id)
 LIMIT CAST(:rows AS bigint)

-- name: two_places
SELECT h.lane, h.position, CAST(h.id AS text), h.topic, h.key, count(*) OVER ()
  FROM postroom.held h
  JOIN postroom.outbox o ON o.lane = h.lane AND o.position = h.position
 LIMIT CAST(:rows AS bigint)

-- name: reused_ids
-- First which ids stand in several rows, from the ids alone; then the contents of those few. A
-- message that was redriven stands in several rows too, with one content.
SELECT min(k.lane), min(k.position), CAST(k.id AS text), min(k.topic), min(k.key), count(*) OVER ()
  FROM (
      SELECT lane, position, id, topic, key, type, payload FROM postroom.outbox
      UNION ALL SELECT lane, position, id, topic, key, type, payload FROM postroom.held
      UNION ALL SELECT lane, 0 AS position, id, topic, key, type, payload FROM postroom.delayed
      UNION ALL SELECT lane, position, id, topic, key, type, payload FROM postroom.archive
      UNION ALL SELECT lane, position, id, topic, key, type, payload FROM postroom.dead_letter WHERE source = 'outbox') k
 WHERE k.id IN (
     SELECT i.id FROM (
          SELECT id FROM postroom.outbox
          UNION ALL SELECT id FROM postroom.held
          UNION ALL SELECT id FROM postroom.delayed
          UNION ALL SELECT id FROM postroom.archive
          UNION ALL SELECT id FROM postroom.dead_letter WHERE source = 'outbox') i
      GROUP BY i.id HAVING count(*) > 1)
 GROUP BY k.id
HAVING count(DISTINCT (k.topic, coalesce(k.key, ''), k.type, md5(k.payload))) > 1
 LIMIT CAST(:rows AS bigint)

-- name: reused_waiting
-- The same among messages that wait, as far as a quick look goes.
SELECT count(*) FROM (
    SELECT i.id FROM (
        SELECT id FROM (SELECT id FROM postroom.outbox LIMIT CAST(:most AS bigint)) o
        UNION ALL SELECT id FROM (SELECT id FROM postroom.held LIMIT CAST(:most AS bigint)) h
        UNION ALL SELECT id FROM (SELECT id FROM postroom.delayed LIMIT CAST(:most AS bigint)) d) i
     GROUP BY i.id HAVING count(*) > 1) r

-- name: two_letters
SELECT d.lane, d.position, CAST(min(CAST(d.id AS text)) AS text), min(d.topic), min(d.key),
       count(*) OVER ()
  FROM postroom.dead_letter d WHERE d.source = 'outbox'
 GROUP BY d.lane, d.position HAVING count(*) > 1
 LIMIT CAST(:rows AS bigint)

-- name: decided_and_pending
-- A letter and a message of the outbox with the same id in the same place.
SELECT d.lane, d.position, CAST(d.id AS text), d.topic, d.key, count(*) OVER ()
  FROM postroom.dead_letter d
  JOIN postroom.outbox o ON o.lane = d.lane AND o.position = d.position AND o.id = d.id
 WHERE d.source = 'outbox' AND d.state <> 'queued'
 LIMIT CAST(:rows AS bigint)

-- name: overdue
-- Due for a minute in a lane that somebody works.
SELECT d.lane, 0, CAST(d.id AS text), d.topic, d.key, count(*) OVER ()
  FROM postroom.lane l JOIN postroom.delayed d ON d.lane = l.lane
 WHERE l.owner IS NOT NULL AND l.lease_until > clock_timestamp() AND NOT l.paused
   AND d.deliver_at < statement_timestamp() - interval '60 seconds'
 LIMIT CAST(:rows AS bigint)

-- name: stale_journal
-- What is written of a batch by a worker that is gone, though no message of it is left.
SELECT b.lane, b.lo, b.incarnation, '', CAST(NULL AS text), count(*) OVER ()
  FROM postroom.lane_batch b
 WHERE NOT EXISTS (SELECT 1 FROM postroom.worker w WHERE w.incarnation = b.incarnation)
   AND NOT EXISTS (SELECT 1 FROM postroom.lane l
                    WHERE l.lane = b.lane AND l.owner = b.incarnation)
   AND NOT EXISTS (SELECT 1 FROM postroom.outbox o
                    WHERE o.lane = b.lane AND o.position BETWEEN b.lo AND b.hi)
   AND NOT EXISTS (SELECT 1 FROM postroom.held h
                    WHERE h.lane = b.lane AND h.position BETWEEN b.lo AND b.hi)
 LIMIT CAST(:rows AS bigint)

-- name: last_position
-- The last position given out; NULL where none was, or where we may not see it.
SELECT last_value FROM pg_sequences
 WHERE CAST(format('%I.%I', schemaname, sequencename) AS regclass)
     = CAST(pg_get_serial_sequence('postroom.outbox', 'position') AS regclass)

-- name: pruned
-- Up to when operators have pruned the archive by hand.
SELECT subject FROM postroom.audit WHERE what = 'prune' AND subject LIKE 'archive before %'
 ORDER BY id DESC LIMIT 1000

-- name: now_us
SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)

-- name: arm_head
-- Gives a stuck head its turn; found again under the lock of its lane, so it is still the head.
UPDATE postroom.held SET next_attempt_at = clock_timestamp()
 WHERE lane = :lane AND position = :position AND next_attempt_at IS NULL AND NOT blocked

-- name: is_head
SELECT 1 FROM postroom.held h
 WHERE h.lane = :lane AND h.position = :position
   AND NOT EXISTS (SELECT 1 FROM postroom.held f WHERE f.lane = h.lane AND f.topic = h.topic
                      AND f.key = h.key AND f.position < h.position)

-- ── prune: how much there is of what `prune_*` of the outbox deletes; counts stop at a limit ────

-- name: old_archive
-- Whole days go, so what counts is the day.
SELECT count(*) FROM (SELECT 1 FROM postroom.archive
 WHERE day < CAST((clock_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second')
                  AT TIME ZONE 'UTC' AS date)
 LIMIT CAST(:most AS bigint)) a

-- name: old_dedup
SELECT count(*) FROM (SELECT 1 FROM postroom.dedup
 WHERE created_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
 LIMIT CAST(:most AS bigint)) a

-- name: old_dead
SELECT count(*) FROM (SELECT 1 FROM postroom.dead_letter
 WHERE state IN ('resolved', 'discarded')
   AND died_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
 LIMIT CAST(:most AS bigint)) a

-- name: old_inbox
SELECT count(*) FROM (SELECT 1 FROM postroom.inbox i
 WHERE i.handled_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
   AND NOT EXISTS (SELECT 1 FROM postroom.inbox_held h
                    WHERE h.consumer = i.consumer AND h.message_id = i.message_id)
 LIMIT CAST(:most AS bigint)) a

-- name: old_keys
SELECT count(*) FROM (SELECT 1 FROM postroom.idempotency_key
 WHERE expires_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
   AND (status = 'completed' OR (status = 'failed' AND (
        mode <> 'resume' OR (locked_until IS NULL AND recovery_point IS NULL))))
 LIMIT CAST(:most AS bigint)) a

-- name: old_jobs
SELECT count(*) FROM (SELECT 1 FROM postroom.job
 WHERE state <> 'running'
   AND updated_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
 LIMIT CAST(:most AS bigint)) a

-- name: old_workers
SELECT count(*) FROM (SELECT 1 FROM postroom.worker
 WHERE seen_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
 LIMIT CAST(:most AS bigint)) a

-- name: prune_workers
WITH gone AS (
DELETE FROM postroom.worker WHERE incarnation IN (
    SELECT incarnation FROM postroom.worker
     WHERE seen_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
     LIMIT CAST(:rows AS bigint))
RETURNING 1)
SELECT count(*) FROM gone

-- name: old_consumers
SELECT count(*) FROM (SELECT 1 FROM postroom.consumer
 WHERE seen_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
 LIMIT CAST(:most AS bigint)) a

-- name: prune_consumers
WITH gone AS (
DELETE FROM postroom.consumer WHERE name IN (
    SELECT name FROM postroom.consumer
     WHERE seen_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
     LIMIT CAST(:rows AS bigint))
RETURNING 1)
SELECT count(*) FROM gone

-- ── doctor: quick at any size ───────────────────────────────────────────────────────────────────

-- name: server_settings
SELECT name, reset_val FROM pg_settings
 WHERE name IN ('autovacuum', 'track_counts', 'default_transaction_isolation', 'fsync',
                'synchronous_commit', 'max_connections', 'server_version_num')

-- name: open_publishers
-- Who holds the lock that publishers hold, and for how long.
SELECT CAST(a.pid AS text), coalesce(nullif(a.application_name, ''), a.usename, 'unknown'),
       CAST(coalesce(extract(epoch FROM clock_timestamp() - a.xact_start), 0) AS bigint),
       coalesce(a.state, 'unknown')
  FROM pg_locks k JOIN pg_stat_activity a ON a.pid = k.pid
 WHERE k.locktype = 'relation' AND k.relation = CAST('postroom.outbox' AS regclass)
   AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND k.mode = 'RowExclusiveLock' AND k.granted AND k.pid <> pg_backend_pid()
 ORDER BY a.xact_start LIMIT 20

-- name: waiting_lanes
-- Lanes nobody works, and how long their oldest message waits, in milliseconds.
SELECT l.lane, CAST(l.paused AS int),
       CAST(extract(epoch FROM clock_timestamp() - o.created_at) * 1000 AS bigint)
  FROM postroom.lane l
 CROSS JOIN LATERAL (SELECT created_at FROM postroom.outbox WHERE lane = l.lane
                      ORDER BY position LIMIT 1) o
 WHERE l.paused OR l.owner IS NULL OR l.lease_until < clock_timestamp()
 ORDER BY l.lane

-- name: oldest_kept
-- Seconds since the oldest of what is kept for a while; the archive by the names of its days.
SELECT (SELECT CAST(extract(epoch FROM clock_timestamp() AT TIME ZONE 'UTC'
                            - min(to_date(right(c.relname, 8), 'YYYYMMDD'))) AS bigint)
          FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
         WHERE i.inhparent = CAST('postroom.archive' AS regclass) AND c.relname ~ '^archive_\d{8}$'),
       (SELECT CAST(extract(epoch FROM clock_timestamp() - min(created_at)) AS bigint)
          FROM postroom.dedup),
       (SELECT CAST(extract(epoch FROM clock_timestamp() - min(handled_at)) AS bigint)
          FROM postroom.inbox)

-- name: outbox_health
-- only: postgresql
SELECT coalesce(array_to_string(c.reloptions, ' '), ''), coalesce(s.n_dead_tup, 0),
       coalesce(s.n_live_tup, 0),
       CAST(extract(epoch FROM clock_timestamp() - greatest(s.last_autovacuum, s.last_vacuum))
            AS bigint)
  FROM pg_class c LEFT JOIN pg_stat_user_tables s ON s.relid = c.oid
 WHERE c.oid = CAST('postroom.outbox' AS regclass)

-- name: pinned
-- only: postgresql
-- What keeps dead rows from being removed.
SELECT 'transaction of process ' || a.pid,
       coalesce(nullif(a.application_name, ''), a.usename, 'unknown') || ', '
           || coalesce(a.state, 'unknown'),
       CAST(extract(epoch FROM clock_timestamp() - a.xact_start) AS bigint)
  FROM pg_stat_activity a
 WHERE (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL) AND a.pid <> pg_backend_pid()
   AND a.xact_start < clock_timestamp() - CAST(:long_ms AS bigint) * interval '1 millisecond'
UNION ALL
SELECT 'prepared transaction ' || p.gid, CAST(p.owner AS text),
       CAST(extract(epoch FROM clock_timestamp() - p.prepared) AS bigint)
  FROM pg_prepared_xacts p
 WHERE p.database = current_database()
   AND p.prepared < clock_timestamp() - CAST(:long_ms AS bigint) * interval '1 millisecond'
UNION ALL
SELECT 'replication slot ' || r.slot_name,
       CASE WHEN r.active THEN 'active' ELSE 'nobody reads it' END, CAST(NULL AS bigint)
  FROM pg_replication_slots r
 WHERE NOT r.active OR age(r.xmin) > 10000000
 LIMIT 20

-- name: days_ahead
-- only: postgresql
-- Days from today on that have a partition, without a gap.
SELECT count(*) FROM (
    SELECT d.day, row_number() OVER (ORDER BY d.day) AS place
      FROM (SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day
              FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
             WHERE i.inhparent = CAST('postroom.archive' AS regclass)
               AND c.relname ~ '^archive_\d{8}$') d
     WHERE d.day >= CAST(clock_timestamp() AT TIME ZONE 'UTC' AS date)) n
 WHERE n.day = CAST(clock_timestamp() AT TIME ZONE 'UTC' AS date) + CAST(n.place AS int) - 1

-- name: ledger_in_trouble
-- Requests nobody knows the end of; those that have not ended though no message of theirs waits; and
-- those that have been asked for in vain for long.
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom.ledger
                               WHERE state = 'unknown' AND finished_at IS NOT NULL
                               LIMIT CAST(:most AS bigint)) u),
       (SELECT count(*) FROM (SELECT id FROM postroom.ledger
                               WHERE state IN ('accepted', 'unknown') AND finished_at IS NULL
                                 AND accepted_at < clock_timestamp() - CAST(:age_s AS bigint) * interval '1 second'
                               LIMIT CAST(:most AS bigint)) l
         WHERE NOT EXISTS (SELECT 1 FROM postroom.outbox o WHERE o.id = l.id)
           AND NOT EXISTS (SELECT 1 FROM postroom.held h WHERE h.id = l.id)
           AND NOT EXISTS (SELECT 1 FROM postroom.delayed d WHERE d.id = l.id)),
       (SELECT count(*) FROM (SELECT id FROM postroom.ledger
                               WHERE state = 'unknown' AND finished_at IS NULL
                                 AND accepted_at < clock_timestamp() - CAST(:age_s AS bigint) * interval '1 second'
                               LIMIT CAST(:most AS bigint)) a
         WHERE EXISTS (SELECT 1 FROM postroom.held h WHERE h.id = a.id))
