-- The relay's queries. A fence number is epoch * 16 + lane: one list says which lanes we believe to
-- own and at which epoch.

-- name: meta_read
SELECT value FROM postroom.meta WHERE name = :item

-- name: meta_write
INSERT INTO postroom.meta (name, value) VALUES (:item, :value)
ON CONFLICT (name) DO UPDATE SET value = excluded.value

-- name: worker_beat
-- Registers the worker at its first beat and keeps it alive afterwards. Needs no durable commit:
-- the next beat comes in a second.
WITH quick AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
INSERT INTO postroom.worker (incarnation, kind, name, report)
SELECT CAST(:incarnation AS text), CAST(:kind AS text), CAST(:worker_name AS text),
       CAST(:report AS text) FROM quick
ON CONFLICT (incarnation) DO UPDATE SET seen_at = clock_timestamp(), report = excluded.report

-- name: workers_live
SELECT incarnation FROM postroom.worker
 WHERE kind = :kind
   AND seen_at > clock_timestamp() - CAST(:within_us AS bigint) * interval '1 microsecond'
 ORDER BY incarnation

-- name: worker_stops
-- It works off what it has, and takes no lanes any more: nobody leaves any to it.
UPDATE postroom.worker SET kind = 'stopping' WHERE incarnation = :incarnation

-- name: worker_gone
DELETE FROM postroom.worker WHERE incarnation = :incarnation

-- name: workers_forget
DELETE FROM postroom.worker WHERE seen_at < clock_timestamp() - interval '1 day'

-- name: lanes_state
-- Microseconds until the lease ends, NULL without an owner; and its length.
SELECT lane, owner, CAST(paused AS int),
       CAST(extract(epoch FROM lease_until - clock_timestamp()) * 1000000 AS bigint), lease_us
  FROM postroom.lane ORDER BY lane

-- name: lanes_cap
-- A lease that ends later than its owner could have written it: the database's clock went back. It
-- ends one lease from now, unless its owner lives and renews it before. A row without a length was
-- written by a relay of an earlier version.
UPDATE postroom.lane
   SET lease_until = clock_timestamp() + coalesce(lease_us, :lease_us) * interval '1 microsecond'
 WHERE owner IS NOT NULL
   AND lease_until > clock_timestamp() + coalesce(lease_us, :lease_us) * interval '1 microsecond'

-- name: lanes_lock_free
-- A lane whose row is locked is being settled or taken by someone: leave it for the next round
-- rather than wait. Under READ COMMITTED the condition is checked again once the lock is ours.
SELECT lane, epoch FROM postroom.lane
 WHERE lane = ANY(CAST(CAST(:lane_list AS text) AS int[])) AND NOT paused
   AND (owner IS NULL OR owner = :owner OR lease_until < clock_timestamp())
 ORDER BY lane FOR UPDATE SKIP LOCKED

-- name: lanes_take
UPDATE postroom.lane
   SET owner = :owner, epoch = epoch + 1,
       lease_until = clock_timestamp() + CAST(:lease_us AS bigint) * interval '1 microsecond',
       lease_us = CAST(:lease_us AS bigint)
 WHERE lane = ANY(CAST(CAST(:lane_list AS text) AS int[]))

-- name: lanes_renew
WITH mine AS MATERIALIZED (
    SELECT lane FROM postroom.lane WHERE owner = :owner ORDER BY lane FOR UPDATE
)
UPDATE postroom.lane l
   SET lease_until = clock_timestamp() + CAST(:lease_us AS bigint) * interval '1 microsecond',
       lease_us = CAST(:lease_us AS bigint)
  FROM mine WHERE l.lane = mine.lane
RETURNING l.lane, l.epoch, CAST(l.paused AS int)

-- name: lanes_release
UPDATE postroom.lane SET owner = NULL, lease_until = NULL
 WHERE owner = :owner AND epoch * 16 + lane = ANY(CAST(CAST(:fence_list AS text) AS bigint[]))

-- name: lanes_notice
-- What an operator may have changed: whether a lane is paused, and whether any of its keys are held.
SELECT l.lane, CAST(l.paused AS int),
       CAST(EXISTS (SELECT 1 FROM postroom.held h WHERE h.lane = l.lane) AS int)
  FROM postroom.lane l WHERE l.lane = ANY(CAST(CAST(:lane_list AS text) AS int[]))

-- name: read_lanes
-- only: postgresql
-- One index scan for each lane past its safe watermark. Each lane may fill the whole read; the
-- running size bounds it by bytes, but the first row always comes. The held key is looked up with
-- LIMIT 1, or all of held might be hashed for each read.
SELECT m.lane, m.position, CAST(m.id AS text), m.topic, m.key, m.type, m.aggregate_type,
       m.aggregate_id, m.content_type, m.headers, m.payload, m.size, m.redrives,
       CAST(date_part('epoch', m.created_at) * 1000000 AS bigint),
       CAST(coalesce(m.expires_at <= clock_timestamp(), false) AS int),
       CASE WHEN m.probe = 1 THEN coalesce((
           SELECT 1 FROM postroom.held h
            WHERE h.lane = m.lane AND h.topic = m.topic AND h.key = m.key LIMIT 1), 0) ELSE 0 END,
       0, CAST(NULL AS text)
  FROM (SELECT o.*, w.probe, sum(o.size) OVER (ROWS UNBOUNDED PRECEDING) AS running
          FROM unnest(CAST(CAST(:lane_list AS text) AS int[]),
                      CAST(CAST(:after_list AS text) AS bigint[]),
                      CAST(CAST(:probe_list AS text) AS int[])) AS w(lane, after, probe)
         CROSS JOIN LATERAL (
               SELECT * FROM postroom.outbox o
                WHERE o.lane = w.lane AND o.position > w.after
                ORDER BY o.position LIMIT CAST(:rows AS bigint)) o) m
 WHERE m.running - m.size < CAST(:bytes AS bigint)
 LIMIT CAST(:total_rows AS bigint)

-- name: horizon
-- only: postgresql
-- Transactions that may still bring messages with positions already passed: a publisher holds
-- this lock from before it takes a position until its commit is visible. The process that answers
-- is in this transaction and no other, behind a pooler too, so it may be left out.
SELECT DISTINCT virtualtransaction FROM pg_locks
 WHERE locktype = 'relation' AND relation = CAST('postroom.outbox' AS regclass)
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND mode = 'RowExclusiveLock' AND granted AND pid IS DISTINCT FROM pg_backend_pid()

-- name: held_due
-- The heads of held keys whose time has come. statement_timestamp, since an index cannot be asked
-- for clock_timestamp, which changes from row to row.
SELECT m.lane, m.position, CAST(m.id AS text), m.topic, m.key, m.type, m.aggregate_type,
       m.aggregate_id, m.content_type, m.headers, m.payload, m.size, m.redrives,
       CAST(date_part('epoch', m.created_at) * 1000000 AS bigint),
       CAST(coalesce(m.expires_at <= clock_timestamp(), false) AS int),
       1, m.attempts, m.history
  FROM (SELECT h.*, sum(h.size) OVER (ORDER BY h.next_attempt_at, h.position) AS running
          FROM (SELECT * FROM postroom.held
                 WHERE lane = :lane AND next_attempt_at <= statement_timestamp()
                 ORDER BY next_attempt_at, position LIMIT CAST(:rows AS bigint)) h) m
 WHERE m.running - m.size < CAST(:bytes AS bigint)
 ORDER BY m.position

-- name: held_run
-- What waits behind the head of one held key, in order, up to one that is blocked.
SELECT m.lane, m.position, CAST(m.id AS text), m.topic, m.key, m.type, m.aggregate_type,
       m.aggregate_id, m.content_type, m.headers, m.payload, m.size, m.redrives,
       CAST(date_part('epoch', m.created_at) * 1000000 AS bigint),
       CAST(coalesce(m.expires_at <= clock_timestamp(), false) AS int),
       1, m.attempts, m.history
  FROM (SELECT h.*, sum(h.size) OVER (ORDER BY h.position) AS running,
               sum(CAST(h.blocked AS int)) OVER (ORDER BY h.position) AS stopped
          FROM (SELECT * FROM postroom.held
                 WHERE lane = :lane AND topic = :topic AND key = :key
                 ORDER BY position LIMIT CAST(:rows AS bigint)) h) m
 WHERE m.running - m.size < CAST(:bytes AS bigint) AND m.stopped = 0
 ORDER BY m.position

-- name: held_any
SELECT 1 FROM postroom.held WHERE lane = :lane LIMIT 1

-- name: journal_read
SELECT incarnation, batch, lo, hi, messages, CAST(alone AS int), CAST(held AS int)
  FROM postroom.lane_batch
 WHERE lane = :lane ORDER BY lo, incarnation, batch

-- name: journal_write
-- Needs no durable commit: it must outlive the relay's process, not the database.
WITH quick AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)),
     mine AS MATERIALIZED (
    SELECT lane FROM postroom.lane, quick
     WHERE owner = :owner AND epoch * 16 + lane = ANY(CAST(CAST(:fence_list AS text) AS bigint[]))
     ORDER BY lane FOR SHARE OF lane
)
INSERT INTO postroom.lane_batch (lane, incarnation, batch, lo, hi, messages, alone, held)
SELECT w.lane, CAST(:owner AS text), w.batch, w.lo, w.hi, w.messages, w.alone = 1, w.held = 1
  FROM jsonb_to_recordset(CAST(CAST(:entries AS text) AS jsonb))
       AS w(lane int, batch bigint, lo bigint, hi bigint, messages int, alone int, held int)
  JOIN mine ON mine.lane = w.lane
RETURNING lane

-- name: journal_clear
DELETE FROM postroom.lane_batch
 WHERE incarnation = :owner AND lane = ANY(CAST(CAST(:lane_list AS text) AS int[]))
   AND batch = ANY(CAST(CAST(:batch_list AS text) AS bigint[]))

-- name: journal_clear_all
-- Of a relay that ends in good order: nobody died.
DELETE FROM postroom.lane_batch WHERE incarnation = :owner

-- name: journal_clear_own
-- Left by this very process, which lived on: nobody is suspect for them.
DELETE FROM postroom.lane_batch WHERE lane = :lane AND incarnation = :owner

-- name: journal_acquit
-- The message was sent alone and the process lived, or it was buried: earlier deaths are settled.
-- Without `late`, only those at the beginning of a send: it has outlived the beginning.
DELETE FROM postroom.lane_batch
 WHERE lane = :lane AND lo = CAST(:position AS bigint) AND hi = lo
   AND (alone OR CAST(:late AS int) = 1)

-- name: journal_gone
-- A dead relay's batches of which no message is left.
SELECT b.incarnation, b.batch FROM postroom.lane_batch b
 WHERE b.lane = :lane AND b.incarnation <> :owner
   AND (b.held OR NOT EXISTS (
        SELECT 1 FROM postroom.outbox o
         WHERE o.lane = b.lane AND o.position BETWEEN b.lo AND b.hi))
   AND (NOT b.held OR NOT EXISTS (
        SELECT 1 FROM postroom.held h
         WHERE h.lane = b.lane AND h.position BETWEEN b.lo AND b.hi AND NOT h.blocked))

-- name: journal_drop
DELETE FROM postroom.lane_batch
 WHERE lane = :lane AND incarnation = :incarnation AND batch = :batch

-- name: fence
-- Which of these lanes are still ours. The share lock keeps a take-over waiting until we commit.
SELECT lane FROM postroom.lane
 WHERE owner = :owner AND epoch * 16 + lane = ANY(CAST(CAST(:fence_list AS text) AS bigint[]))
 ORDER BY lane FOR SHARE

-- name: settle_deleted
-- only: postgresql
-- The whole settle of a batch without failures, in one autocommit statement. EXISTS (... epoch ...)
-- or FOR KEY SHARE in place of the locked CTE would delete rows after a take-over.
WITH mine AS MATERIALIZED (
    SELECT lane FROM postroom.lane
     WHERE owner = :owner AND epoch * 16 + lane = ANY(CAST(CAST(:fence_list AS text) AS bigint[]))
     ORDER BY lane FOR SHARE
), gone AS (
    DELETE FROM postroom.outbox o
     USING unnest(CAST(CAST(:lane_list AS text) AS int[]),
                  CAST(CAST(:position_list AS text) AS bigint[])) AS w(lane, position), mine
     WHERE o.lane = w.lane AND o.position = w.position AND mine.lane = w.lane
    RETURNING 1
), journal AS (
    DELETE FROM postroom.lane_batch b USING mine
     WHERE b.lane = mine.lane AND b.incarnation = :owner
       AND b.batch = ANY(CAST(CAST(:batch_list AS text) AS bigint[]))
)
SELECT mine.lane, (SELECT count(*) FROM gone) FROM mine

-- name: settle_archived
-- only: postgresql
-- As settle_deleted, and a copy of each message goes to the archive: exactly what was deleted, so
-- that no message is archived twice for one delivery, and no unique index needs to see to it.
WITH mine AS MATERIALIZED (
    SELECT lane FROM postroom.lane
     WHERE owner = :owner AND epoch * 16 + lane = ANY(CAST(CAST(:fence_list AS text) AS bigint[]))
     ORDER BY lane FOR SHARE
), gone AS (
    DELETE FROM postroom.outbox o
     USING unnest(CAST(CAST(:lane_list AS text) AS int[]),
                  CAST(CAST(:position_list AS text) AS bigint[])) AS w(lane, position), mine
     WHERE o.lane = w.lane AND o.position = w.position AND mine.lane = w.lane
    RETURNING o.*
), kept AS (
    INSERT INTO postroom.archive (day, id, lane, position, topic, key, type, aggregate_type,
           aggregate_id, content_type, headers, payload, size, redrives, attempts, created_at,
           delivered_at)
    SELECT CAST(now() AT TIME ZONE 'UTC' AS date), id, lane, position, topic, key, type,
           aggregate_type, aggregate_id, content_type, headers, payload, size, redrives, 1,
           created_at, clock_timestamp()
      FROM gone
), journal AS (
    DELETE FROM postroom.lane_batch b USING mine
     WHERE b.lane = mine.lane AND b.incarnation = :owner
       AND b.batch = ANY(CAST(CAST(:batch_list AS text) AS bigint[]))
)
SELECT mine.lane, (SELECT count(*) FROM gone) FROM mine

-- name: outbox_archive
INSERT INTO postroom.archive (day, id, lane, position, topic, key, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, redrives, attempts, created_at,
       delivered_at)
SELECT CAST(now() AT TIME ZONE 'UTC' AS date), o.id, o.lane, o.position, o.topic, o.key, o.type,
       o.aggregate_type, o.aggregate_id, o.content_type, o.headers, o.payload, o.size, o.redrives,
       1, o.created_at, clock_timestamp()
  FROM unnest(CAST(CAST(:lane_list AS text) AS int[]),
              CAST(CAST(:position_list AS text) AS bigint[])) AS w(lane, position)
  JOIN postroom.outbox o ON o.lane = w.lane AND o.position = w.position

-- name: outbox_delete
-- Tells how many were there: what is missing was cancelled, or settled already.
WITH gone AS (
    DELETE FROM postroom.outbox o
     USING unnest(CAST(CAST(:lane_list AS text) AS int[]),
                  CAST(CAST(:position_list AS text) AS bigint[])) AS w(lane, position)
     WHERE o.lane = w.lane AND o.position = w.position
    RETURNING 1
)
SELECT count(*) FROM gone

-- name: held_archive
INSERT INTO postroom.archive (day, id, lane, position, topic, key, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, redrives, attempts, created_at,
       delivered_at)
SELECT CAST(now() AT TIME ZONE 'UTC' AS date), h.id, h.lane, h.position, h.topic, h.key, h.type,
       h.aggregate_type, h.aggregate_id, h.content_type, h.headers, h.payload, h.size, h.redrives,
       h.attempts + 1, h.created_at, clock_timestamp()
  FROM unnest(CAST(CAST(:lane_list AS text) AS int[]),
              CAST(CAST(:position_list AS text) AS bigint[])) AS w(lane, position)
  JOIN postroom.held h ON h.lane = w.lane AND h.position = w.position

-- name: held_delete
WITH gone AS (
    DELETE FROM postroom.held h
     USING unnest(CAST(CAST(:lane_list AS text) AS int[]),
                  CAST(CAST(:position_list AS text) AS bigint[])) AS w(lane, position)
     WHERE h.lane = w.lane AND h.position = w.position
    RETURNING 1
)
SELECT count(*) FROM gone

-- name: hold
-- Moves messages from the outbox to where they wait. They are not due until something says so.
WITH gone AS (
    DELETE FROM postroom.outbox o
     USING unnest(CAST(CAST(:lane_list AS text) AS int[]),
                  CAST(CAST(:position_list AS text) AS bigint[])) AS w(lane, position)
     WHERE o.lane = w.lane AND o.position = w.position
    RETURNING o.*
)
INSERT INTO postroom.held (lane, position, id, topic, key, type, aggregate_type, aggregate_id,
       content_type, headers, payload, size, redrives, created_at, expires_at)
SELECT lane, position, id, topic, key, type, aggregate_type, aggregate_id, content_type, headers,
       payload, size, redrives, created_at, expires_at
  FROM gone

-- name: hold_failed
-- Due when it expires, if that is earlier: an expired head must not hold its key.
UPDATE postroom.held
   SET attempts = :attempts, history = :history, error_code = :error_code, error = :error,
       next_attempt_at = least(expires_at,
           clock_timestamp() + CAST(:delay_us AS bigint) * interval '1 microsecond')
 WHERE lane = :lane AND position = :position

-- name: hold_later
-- A destination is down: its messages wait without an attempt being spent.
UPDATE postroom.held h
   SET next_attempt_at = least(h.expires_at,
           clock_timestamp() + CAST(:delay_us AS bigint) * interval '1 microsecond')
  FROM unnest(CAST(CAST(:lane_list AS text) AS int[]),
              CAST(CAST(:position_list AS text) AS bigint[])) AS w(lane, position)
 WHERE h.lane = w.lane AND h.position = w.position

-- name: hold_doubt
-- It waits untried, and may have arrived before: that is kept with it.
UPDATE postroom.held SET history = :history WHERE lane = :lane AND position = :position

-- name: heads_arm
-- The first message of each of these keys becomes due, unless it already has its time or is a
-- dead letter that holds the key.
UPDATE postroom.held h
   SET next_attempt_at = clock_timestamp() + CAST(:delay_us AS bigint) * interval '1 microsecond'
  FROM jsonb_to_recordset(CAST(CAST(:keys AS text) AS jsonb)) AS w(lane int, topic text, key text)
 CROSS JOIN LATERAL (
       SELECT f.position FROM postroom.held f
        WHERE f.lane = w.lane AND f.topic = w.topic AND f.key = w.key
        ORDER BY f.position LIMIT 1) first
 WHERE h.lane = w.lane AND h.position = first.position
   AND h.next_attempt_at IS NULL AND NOT h.blocked

-- name: bury
-- A redriven message that dies again updates its row: it kept its position. Another message under
-- the same id, which its publisher chose, is a letter of its own.
INSERT INTO postroom.dead_letter (source, id, lane, position, topic, key, type, aggregate_type,
       aggregate_id, content_type, headers, payload, size, created_at, expires_at, state, holds_key,
       error_code, error, attempts, history, redrives, died_at)
SELECT 'outbox', h.id, h.lane, h.position, h.topic, h.key, h.type, h.aggregate_type, h.aggregate_id,
       h.content_type, h.headers, h.payload, h.size, h.created_at, h.expires_at,
       CAST(:state AS text), CAST(:holds_key AS int) = 1, CAST(:error_code AS text),
       CAST(:error AS text), CAST(:attempts AS int), CAST(:history AS text), h.redrives,
       clock_timestamp()
  FROM postroom.held h WHERE h.lane = :lane AND h.position = :position
ON CONFLICT (source, id, position) DO UPDATE
   SET state = excluded.state, holds_key = excluded.holds_key, error_code = excluded.error_code,
       error = excluded.error, attempts = excluded.attempts, history = excluded.history,
       redrives = excluded.redrives, died_at = excluded.died_at

-- name: held_block
UPDATE postroom.held
   SET blocked = true, next_attempt_at = NULL, attempts = :attempts, history = :history,
       error_code = :error_code, error = :error
 WHERE lane = :lane AND position = :position

-- name: redriven_resolve
UPDATE postroom.dead_letter SET state = 'resolved', ended_at = clock_timestamp()
 WHERE source = 'outbox' AND id = CAST(CAST(:id AS text) AS uuid) AND position = :position
   AND state = 'queued'

-- name: delayed_lanes
-- Which of these lanes have something that has become due: an idle relay asks this often, so it is
-- one look that locks nothing. LIMIT 1, or a large backlog might be read whole.
SELECT l.lane FROM unnest(CAST(CAST(:lane_list AS text) AS int[])) AS l(lane)
 CROSS JOIN LATERAL (
    SELECT 1 FROM postroom.delayed d
     WHERE d.lane = l.lane AND d.deliver_at <= statement_timestamp() LIMIT 1) due

-- name: delayed_due
-- Which delayed messages of a lane have become due, in their order.
SELECT lane, CAST(deliver_at AS text), CAST(id AS text) FROM postroom.delayed
 WHERE lane = :lane AND deliver_at <= statement_timestamp()
 ORDER BY deliver_at, id LIMIT CAST(:rows AS bigint)

-- name: promote
-- Moves exactly these into the outbox, where each takes its place at the end.
WITH due AS (
    DELETE FROM postroom.delayed d
     USING jsonb_to_recordset(CAST(CAST(:entries AS text) AS jsonb))
           AS w(lane int, deliver_at timestamptz, id uuid)
     WHERE d.lane = w.lane AND d.deliver_at = w.deliver_at AND d.id = w.id
    RETURNING d.*
)
INSERT INTO postroom.outbox (lane, id, topic, key, type, aggregate_type, aggregate_id, content_type,
       headers, payload, size, created_at, expires_at)
SELECT lane, id, topic, key, type, aggregate_type, aggregate_id, content_type, headers, payload,
       size, created_at, expires_at
  FROM due ORDER BY deliver_at, id

-- name: archive_days
SELECT postroom.make_archive_days(7)

-- name: archive_overflow
SELECT count(*) FROM (SELECT 1 FROM postroom.archive_overflow LIMIT 1000) o

-- name: prune_archive
SELECT postroom.drop_archive_days(CAST(:keep_seconds AS bigint))

-- name: prune_overflow
WITH gone AS (
DELETE FROM postroom.archive_overflow WHERE (id, day) IN (
    SELECT id, day FROM postroom.archive_overflow
     WHERE day < CAST(now() AT TIME ZONE 'UTC' AS date)
               - CAST(CAST(:keep_seconds AS bigint) / 86400 AS int)
     LIMIT CAST(:rows AS bigint))
RETURNING 1)
SELECT count(*) FROM gone

-- name: prune_dedup
WITH gone AS (
DELETE FROM postroom.dedup WHERE dedup_key IN (
    SELECT dedup_key FROM postroom.dedup
     WHERE created_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
     ORDER BY created_at LIMIT CAST(:rows AS bigint))
RETURNING 1)
SELECT count(*) FROM gone

-- name: prune_dead
-- Only what a person has decided on, or what ended by itself.
WITH gone AS (
DELETE FROM postroom.dead_letter WHERE (source, id, position) IN (
    SELECT source, id, position FROM postroom.dead_letter
     WHERE state IN ('resolved', 'discarded')
       AND died_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
     ORDER BY died_at LIMIT CAST(:rows AS bigint))
RETURNING 1)
SELECT count(*) FROM gone

-- name: prune_inbox
-- Never what its consumer still has, to be tried again or as a dead letter: a copy would be handled
-- beside it.
WITH gone AS (
DELETE FROM postroom.inbox WHERE (consumer, message_id) IN (
    SELECT i.consumer, i.message_id FROM postroom.inbox i
     WHERE i.handled_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
       AND NOT EXISTS (SELECT 1 FROM postroom.inbox_held h
                        WHERE h.consumer = i.consumer AND h.message_id = i.message_id)
     ORDER BY i.handled_at LIMIT CAST(:rows AS bigint))
RETURNING 1)
SELECT count(*) FROM gone

-- name: prune_keys
-- What was answered and has expired. Never what is pending, in doubt, or half done:
-- of what may be resumed, only what was refused before any point.
WITH gone AS (
DELETE FROM postroom.idempotency_key WHERE (scope, operation, key) IN (
    SELECT scope, operation, key FROM postroom.idempotency_key
     WHERE expires_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
       AND (status = 'completed' OR (status = 'failed' AND (
            mode <> 'resume' OR (locked_until IS NULL AND recovery_point IS NULL))))
     ORDER BY expires_at LIMIT CAST(:rows AS bigint))
   AND expires_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
   AND (status = 'completed' OR (status = 'failed' AND (
        mode <> 'resume' OR (locked_until IS NULL AND recovery_point IS NULL))))
RETURNING 1)
SELECT count(*) FROM gone

-- name: prune_jobs
-- The items of jobs that ended long ago, and then the jobs.
WITH old AS MATERIALIZED (
    SELECT id FROM postroom.job
     WHERE state <> 'running'
       AND updated_at < statement_timestamp() - CAST(:keep_seconds AS bigint) * interval '1 second'
     ORDER BY id LIMIT 10
), items AS MATERIALIZED (
    SELECT i.job, i.id, i.position FROM old JOIN postroom.job_item i ON i.job = old.id
     LIMIT CAST(:rows AS bigint)
), gone AS (
    DELETE FROM postroom.job_item i USING items w
     WHERE i.job = w.job AND i.id = w.id AND i.position = w.position RETURNING 1
), ended AS (
    DELETE FROM postroom.job j USING old
     WHERE j.id = old.id AND NOT EXISTS (SELECT 1 FROM items) RETURNING 1
)
SELECT (SELECT count(*) FROM gone) + (SELECT count(*) FROM ended)

-- name: clock
-- The database's time in microseconds: the age of a message is measured by it.
SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)

-- name: measure_lane
-- How many wait in a lane, up to a limit; how many held messages have a next attempt; and for how
-- long the first one waits, in the outbox and of what has become due.
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom.outbox o
                               WHERE o.lane = :lane AND o.position > CAST(:after AS bigint)
                               LIMIT CAST(:most AS bigint)) p),
       (SELECT count(*) FROM (SELECT 1 FROM postroom.held h
                               WHERE h.lane = :lane AND h.next_attempt_at IS NOT NULL
                               LIMIT CAST(:most AS bigint)) n),
       (SELECT CAST(extract(epoch FROM clock_timestamp() - o.created_at) * 1000 AS bigint)
          FROM postroom.outbox o WHERE o.lane = :lane AND o.position > CAST(:after AS bigint)
         ORDER BY o.position LIMIT 1),
       (SELECT CAST(extract(epoch FROM clock_timestamp() - d.deliver_at) * 1000 AS bigint)
          FROM postroom.delayed d WHERE d.lane = :lane AND d.deliver_at <= statement_timestamp()
         ORDER BY d.deliver_at LIMIT 1)

-- name: measure_held
-- For how long the first held message of a lane waits. A dead letter that holds its key waits for a
-- person, so it is passed over; the first of many are looked at, not all.
SELECT CAST(extract(epoch FROM clock_timestamp() - min(f.created_at)) * 1000 AS bigint)
  FROM (SELECT h.created_at, h.blocked FROM postroom.held h
         WHERE h.lane = :lane ORDER BY h.position LIMIT 200) f
 WHERE NOT f.blocked

-- name: measure_outbox
-- What the database believes the outbox to hold, where counting would take too long.
SELECT pg_stat_get_live_tuples(CAST('postroom.outbox' AS regclass))

-- name: waiting_topics
-- How many messages wait for delivery, by topic, up to a limit.
SELECT w.topic, count(*)
  FROM (SELECT topic FROM (SELECT topic FROM postroom.outbox LIMIT CAST(:most AS bigint)) o
         UNION ALL
        SELECT topic FROM (SELECT topic FROM postroom.held WHERE NOT blocked LIMIT CAST(:most AS bigint)) h) w
 GROUP BY w.topic ORDER BY w.topic

-- name: measure_totals
-- Silent workers are those that ended without stopping, not long ago: each beats every second.
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom.held LIMIT CAST(:most AS bigint)) h),
       (SELECT count(*) FROM (SELECT 1 FROM postroom.delayed LIMIT CAST(:most AS bigint)) d),
       (SELECT count(*) FROM postroom.lane
         WHERE NOT paused AND (owner IS NULL OR lease_until < clock_timestamp())),
       (SELECT count(*) FROM postroom.worker
         WHERE seen_at BETWEEN clock_timestamp() - interval '600 seconds'
                           AND clock_timestamp() - interval '15 seconds')

-- name: measure_dead
SELECT count(*), coalesce(sum(CAST(d.holds_key AS int)), 0)
  FROM (SELECT holds_key FROM postroom.dead_letter
         WHERE state = 'dead' AND source = 'outbox'
         LIMIT CAST(:most AS bigint)) d

-- name: open_publishers
-- only: postgresql
-- As `horizon`, with the time each is open, where this role may see it.
SELECT l.virtualtransaction,
       max(CAST(extract(epoch FROM clock_timestamp() - a.xact_start) * 1000 AS bigint))
  FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'relation' AND l.relation = CAST('postroom.outbox' AS regclass)
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND l.mode = 'RowExclusiveLock' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
 GROUP BY l.virtualtransaction
