-- Redrives and replays of many messages. What a job is about is written down when it begins
-- (job_item), in position order, so that it ends, can go on after a crash, and keeps each key's
-- order. Every page is one transaction, fenced by the job's owner and epoch.

-- name: letters_groups
SELECT topic, type, error_code, count(*), source FROM postroom.dead_letter
 WHERE state = 'dead' AND (CAST(:source AS text) IS NULL OR source = CAST(:source AS text))
   AND (CAST(:topic AS text) IS NULL OR topic = CAST(:topic AS text))
   AND (CAST(:key AS text) IS NULL OR key = CAST(:key AS text))
   AND (CAST(:type AS text) IS NULL OR type = CAST(:type AS text))
   AND (CAST(:error_code AS text) IS NULL OR error_code = CAST(:error_code AS text))
   AND died_at >= to_timestamp(0) + CAST(:since AS bigint) * interval '1 microsecond'
   AND died_at < to_timestamp(0) + CAST(:until AS bigint) * interval '1 microsecond'
 GROUP BY topic, type, error_code, source
 ORDER BY count(*) DESC, topic, type, error_code, source

-- name: letters_take
-- Letters of two sources may share a message and a position: one item stands for both.
INSERT INTO postroom.job_item (job, position, id)
SELECT DISTINCT CAST(CAST(:job AS text) AS uuid), position, id FROM postroom.dead_letter
 WHERE state = 'dead' AND (CAST(:source AS text) IS NULL OR source = CAST(:source AS text))
   AND (CAST(:topic AS text) IS NULL OR topic = CAST(:topic AS text))
   AND (CAST(:key AS text) IS NULL OR key = CAST(:key AS text))
   AND (CAST(:type AS text) IS NULL OR type = CAST(:type AS text))
   AND (CAST(:error_code AS text) IS NULL OR error_code = CAST(:error_code AS text))
   AND died_at >= to_timestamp(0) + CAST(:since AS bigint) * interval '1 microsecond'
   AND died_at < to_timestamp(0) + CAST(:until AS bigint) * interval '1 microsecond'
 ORDER BY position LIMIT CAST(:most AS bigint)

-- name: archive_groups
SELECT topic, type, NULL, count(DISTINCT (id, created_at)), NULL FROM postroom.archive
 WHERE (CAST(:topic AS text) IS NULL OR topic = CAST(:topic AS text))
   AND (CAST(:key AS text) IS NULL OR key = CAST(:key AS text))
   AND (CAST(:type AS text) IS NULL OR type = CAST(:type AS text))
   AND day >= CAST(CAST(:first_day AS text) AS date)
   AND day <= CAST(CAST(:last_day AS text) AS date)
   AND delivered_at >= to_timestamp(0) + CAST(:since AS bigint) * interval '1 microsecond'
   AND delivered_at < to_timestamp(0) + CAST(:until AS bigint) * interval '1 microsecond'
   AND (CAST(:requests AS integer) = 1 OR coalesce(strpos(headers, '"postroom-ledger"'), 0) = 0)
 GROUP BY topic, type ORDER BY count(DISTINCT (id, created_at)) DESC, topic, type

-- name: archive_requests
-- Requests of the ledger, which a replay leaves alone: to place them again is no small thing.
SELECT count(DISTINCT (id, created_at)) FROM postroom.archive
 WHERE (CAST(:topic AS text) IS NULL OR topic = CAST(:topic AS text))
   AND (CAST(:key AS text) IS NULL OR key = CAST(:key AS text))
   AND (CAST(:type AS text) IS NULL OR type = CAST(:type AS text))
   AND day >= CAST(CAST(:first_day AS text) AS date)
   AND day <= CAST(CAST(:last_day AS text) AS date)
   AND delivered_at >= to_timestamp(0) + CAST(:since AS bigint) * interval '1 microsecond'
   AND delivered_at < to_timestamp(0) + CAST(:until AS bigint) * interval '1 microsecond'
   AND strpos(headers, '"postroom-ledger"') > 0

-- name: archive_take
-- Each message once: one that was replayed before has a row for each delivery. Two messages under
-- one id, which their publishers chose, differ in their time.
INSERT INTO postroom.job_item (job, position, id)
SELECT CAST(CAST(:job AS text) AS uuid), min(position), id FROM postroom.archive
 WHERE (CAST(:topic AS text) IS NULL OR topic = CAST(:topic AS text))
   AND (CAST(:key AS text) IS NULL OR key = CAST(:key AS text))
   AND (CAST(:type AS text) IS NULL OR type = CAST(:type AS text))
   AND day >= CAST(CAST(:first_day AS text) AS date)
   AND day <= CAST(CAST(:last_day AS text) AS date)
   AND delivered_at >= to_timestamp(0) + CAST(:since AS bigint) * interval '1 microsecond'
   AND delivered_at < to_timestamp(0) + CAST(:until AS bigint) * interval '1 microsecond'
   AND (CAST(:requests AS integer) = 1 OR coalesce(strpos(headers, '"postroom-ledger"'), 0) = 0)
 GROUP BY id, created_at ORDER BY min(position) LIMIT CAST(:most AS bigint)

-- name: items_count
SELECT count(*) FROM postroom.job_item WHERE job = CAST(CAST(:job AS text) AS uuid)

-- name: begin
INSERT INTO postroom.job (id, kind, state, wish, total, who, why, owner, epoch, lease_until,
       lease_us)
VALUES (CAST(CAST(:job AS text) AS uuid), :kind, 'running', :wish, :total, :who, :why, :owner, 1,
        clock_timestamp() + CAST(:lease_us AS bigint) * interval '1 microsecond',
        CAST(:lease_us AS bigint))

-- name: read
-- A lease that ends later than its owner could have written it is over as well: the clock went back.
-- The epoch stops an owner that lives.
SELECT CAST(id AS text), kind, state, wish, reached, total, queued, note, who, why, owner, epoch,
       CASE WHEN owner IS NULL OR lease_until < clock_timestamp()
              OR lease_until > clock_timestamp() + lease_us * interval '1 microsecond'
            THEN 1 ELSE 0 END,
       CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM updated_at) * 1000000 AS bigint)
  FROM postroom.job WHERE id = CAST(CAST(:job AS text) AS uuid)

-- name: list
SELECT CAST(id AS text), kind, state, wish, reached, total, queued, note, who, why, owner, epoch,
       CASE WHEN owner IS NULL OR lease_until < clock_timestamp()
              OR lease_until > clock_timestamp() + lease_us * interval '1 microsecond'
            THEN 1 ELSE 0 END,
       CAST(extract(epoch FROM created_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM updated_at) * 1000000 AS bigint)
  FROM postroom.job ORDER BY created_at DESC, id LIMIT CAST(:rows AS bigint)

-- name: lock
SELECT owner, epoch, state,
       CASE WHEN owner IS NULL OR lease_until < clock_timestamp()
              OR lease_until > clock_timestamp() + lease_us * interval '1 microsecond'
            THEN 1 ELSE 0 END
  FROM postroom.job WHERE id = CAST(CAST(:job AS text) AS uuid) FOR UPDATE

-- name: take_over
UPDATE postroom.job
   SET owner = :owner, epoch = epoch + 1, state = 'running', note = NULL,
       lease_until = clock_timestamp() + CAST(:lease_us AS bigint) * interval '1 microsecond',
       lease_us = CAST(:lease_us AS bigint),
       updated_at = clock_timestamp()
 WHERE id = CAST(CAST(:job AS text) AS uuid)

-- name: reach
UPDATE postroom.job
   SET reached = :reached, queued = queued + CAST(:queued AS bigint),
       lease_until = clock_timestamp() + CAST(:lease_us AS bigint) * interval '1 microsecond',
       lease_us = CAST(:lease_us AS bigint),
       updated_at = clock_timestamp()
 WHERE id = CAST(CAST(:job AS text) AS uuid)

-- name: renew
UPDATE postroom.job
   SET lease_until = clock_timestamp() + CAST(:lease_us AS bigint) * interval '1 microsecond',
       lease_us = CAST(:lease_us AS bigint)
 WHERE id = CAST(CAST(:job AS text) AS uuid)

-- name: finish
UPDATE postroom.job
   SET state = :state, note = :note, owner = NULL, lease_until = NULL, epoch = epoch + 1,
       updated_at = clock_timestamp()
 WHERE id = CAST(CAST(:job AS text) AS uuid)

-- name: items_page
SELECT position, CAST(id AS text) FROM postroom.job_item
 WHERE job = CAST(CAST(:job AS text) AS uuid) AND position >= CAST(:position AS bigint)
   AND (position > CAST(:position AS bigint) OR id > CAST(CAST(:id AS text) AS uuid))
 ORDER BY position, id LIMIT CAST(:rows AS bigint)

-- name: letters_page
SELECT CAST(d.id AS text), d.lane, d.position, CAST(d.holds_key AS int), d.topic, d.key, d.state
  FROM postroom.job_item i
  JOIN postroom.dead_letter d ON d.source = CAST(:source AS text) AND d.id = i.id AND d.position = i.position
 WHERE i.job = CAST(CAST(:job AS text) AS uuid)
   AND i.position BETWEEN CAST(:lo AS bigint) AND CAST(:hi AS bigint)
 ORDER BY d.position, d.id

-- name: outcomes
-- What became of the letters a job has queued so far.
SELECT d.state, count(*)
  FROM postroom.job_item i
  JOIN postroom.dead_letter d ON d.source = CAST(:source AS text) AND d.id = i.id AND d.position = i.position
 WHERE i.job = CAST(CAST(:job AS text) AS uuid) AND i.position <= CAST(:position AS bigint)
 GROUP BY d.state

-- name: died_again
-- How many of the messages a job has replayed died since it began.
SELECT 'dead', count(*)
  FROM postroom.job_item i
  JOIN postroom.dead_letter d ON d.source = 'outbox' AND d.id = i.id AND d.state = 'dead'
  JOIN postroom.job j ON j.id = i.job
 WHERE i.job = CAST(CAST(:job AS text) AS uuid) AND i.position <= CAST(:position AS bigint)
   AND d.died_at >= j.created_at

-- name: archive_page
SELECT CAST(a.id AS text), a.position, a.topic, a.key
  FROM postroom.job_item i
  JOIN postroom.archive a ON a.id = i.id AND a.position = i.position
 WHERE i.job = CAST(CAST(:job AS text) AS uuid)
   AND i.position BETWEEN CAST(:lo AS bigint) AND CAST(:hi AS bigint)
   AND a.position BETWEEN CAST(:lo AS bigint) AND CAST(:hi AS bigint)
 ORDER BY a.position, a.id

-- name: count_replay
-- Each replay has a number, which keeps a broker from taking it for a duplicate.
UPDATE postroom.archive SET redrives = redrives + 1
 WHERE id = CAST(CAST(:id AS text) AS uuid) AND position = :position

-- name: replay
INSERT INTO postroom.outbox (lane, id, topic, key, type, aggregate_type, aggregate_id, content_type,
       headers, payload, size, redrives, created_at)
SELECT :lane, id, :topic, key, type, aggregate_type, aggregate_id, content_type, headers, payload,
       size, redrives, created_at
  FROM postroom.archive WHERE id = CAST(CAST(:id AS text) AS uuid) AND position = :position
