-- What MariaDB says differently.

-- name: letters_groups
SELECT topic, type, error_code, count(*), source FROM postroom_dead_letter
 WHERE state = 'dead' AND (:source IS NULL OR source = :source)
   AND (:topic IS NULL OR topic = :topic)
   AND (:key IS NULL OR `key` = :key)
   AND (:type IS NULL OR type = :type)
   AND (:error_code IS NULL OR error_code = :error_code)
   AND died_at >= '1970-01-01' + INTERVAL :since MICROSECOND
   AND died_at < '1970-01-01' + INTERVAL :until MICROSECOND
 GROUP BY topic, type, error_code, source
 ORDER BY count(*) DESC, topic, type, error_code, source

-- name: letters_take
INSERT INTO postroom_job_item (job, position, id)
SELECT DISTINCT :job, position, id FROM postroom_dead_letter
 WHERE state = 'dead' AND (:source IS NULL OR source = :source)
   AND (:topic IS NULL OR topic = :topic)
   AND (:key IS NULL OR `key` = :key)
   AND (:type IS NULL OR type = :type)
   AND (:error_code IS NULL OR error_code = :error_code)
   AND died_at >= '1970-01-01' + INTERVAL :since MICROSECOND
   AND died_at < '1970-01-01' + INTERVAL :until MICROSECOND
 ORDER BY position LIMIT :most

-- name: archive_groups
SELECT topic, type, NULL, count(DISTINCT id, created_at), NULL FROM postroom_archive
 WHERE (:topic IS NULL OR topic = :topic)
   AND (:key IS NULL OR `key` = :key)
   AND (:type IS NULL OR type = :type)
   AND day >= CAST(:first_day AS date)
   AND day <= CAST(:last_day AS date)
   AND delivered_at >= '1970-01-01' + INTERVAL :since MICROSECOND
   AND delivered_at < '1970-01-01' + INTERVAL :until MICROSECOND
   AND (:requests = 1 OR coalesce(INSTR(headers, '"postroom-ledger"'), 0) = 0)
 GROUP BY topic, type ORDER BY count(DISTINCT id, created_at) DESC, topic, type

-- name: archive_requests
SELECT count(DISTINCT id, created_at) FROM postroom_archive
 WHERE (:topic IS NULL OR topic = :topic)
   AND (:key IS NULL OR `key` = :key)
   AND (:type IS NULL OR type = :type)
   AND day >= CAST(:first_day AS date)
   AND day <= CAST(:last_day AS date)
   AND delivered_at >= '1970-01-01' + INTERVAL :since MICROSECOND
   AND delivered_at < '1970-01-01' + INTERVAL :until MICROSECOND
   AND INSTR(headers, '"postroom-ledger"') > 0

-- name: archive_take
-- Each message once: one that was replayed before has a row for each delivery. Two messages under
-- one id, which their publishers chose, differ in their time.
INSERT INTO postroom_job_item (job, position, id)
SELECT :job, min(position), id FROM postroom_archive
 WHERE (:topic IS NULL OR topic = :topic)
   AND (:key IS NULL OR `key` = :key)
   AND (:type IS NULL OR type = :type)
   AND day >= CAST(:first_day AS date)
   AND day <= CAST(:last_day AS date)
   AND delivered_at >= '1970-01-01' + INTERVAL :since MICROSECOND
   AND delivered_at < '1970-01-01' + INTERVAL :until MICROSECOND
   AND (:requests = 1 OR coalesce(INSTR(headers, '"postroom-ledger"'), 0) = 0)
 GROUP BY id, created_at ORDER BY min(position) LIMIT :most

-- name: items_count
SELECT count(*) FROM postroom_job_item WHERE job = :job

-- name: begin
INSERT INTO postroom_job (id, kind, state, wish, total, who, why, owner, epoch, lease_until,
       lease_us)
VALUES (:job, :kind, 'running', :wish, :total, :who, :why, :owner, 1,
        UTC_TIMESTAMP(6) + INTERVAL :lease_us MICROSECOND, :lease_us)

-- name: read
SELECT id, kind, state, wish, reached, total, queued, note, who, why, owner, epoch,
       CASE WHEN owner IS NULL OR lease_until < UTC_TIMESTAMP(6)
              OR lease_until > UTC_TIMESTAMP(6) + INTERVAL lease_us MICROSECOND
            THEN 1 ELSE 0 END,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', updated_at)
  FROM postroom_job WHERE id = :job

-- name: list
SELECT id, kind, state, wish, reached, total, queued, note, who, why, owner, epoch,
       CASE WHEN owner IS NULL OR lease_until < UTC_TIMESTAMP(6)
              OR lease_until > UTC_TIMESTAMP(6) + INTERVAL lease_us MICROSECOND
            THEN 1 ELSE 0 END,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', updated_at)
  FROM postroom_job ORDER BY created_at DESC, id LIMIT :rows

-- name: lock
SELECT owner, epoch, state,
       CASE WHEN owner IS NULL OR lease_until < UTC_TIMESTAMP(6)
              OR lease_until > UTC_TIMESTAMP(6) + INTERVAL lease_us MICROSECOND
            THEN 1 ELSE 0 END
  FROM postroom_job WHERE id = :job FOR UPDATE

-- name: take_over
UPDATE postroom_job
   SET owner = :owner, epoch = epoch + 1, state = 'running', note = NULL,
       lease_until = UTC_TIMESTAMP(6) + INTERVAL :lease_us MICROSECOND, lease_us = :lease_us,
       updated_at = UTC_TIMESTAMP(6)
 WHERE id = :job

-- name: reach
UPDATE postroom_job
   SET reached = :reached, queued = queued + :queued,
       lease_until = UTC_TIMESTAMP(6) + INTERVAL :lease_us MICROSECOND, lease_us = :lease_us,
       updated_at = UTC_TIMESTAMP(6)
 WHERE id = :job

-- name: renew
UPDATE postroom_job
   SET lease_until = UTC_TIMESTAMP(6) + INTERVAL :lease_us MICROSECOND, lease_us = :lease_us
 WHERE id = :job

-- name: finish
UPDATE postroom_job
   SET state = :state, note = :note, owner = NULL, lease_until = NULL, epoch = epoch + 1,
       updated_at = UTC_TIMESTAMP(6)
 WHERE id = :job

-- name: items_page
SELECT position, id FROM postroom_job_item
 WHERE job = :job AND position >= :position
   AND (position > :position OR id > :id)
 ORDER BY position, id LIMIT :rows

-- name: letters_page
SELECT d.id, d.lane, d.position, d.holds_key, d.topic, d.`key`, d.state
  FROM postroom_job_item i
  JOIN postroom_dead_letter d ON d.source = :source AND d.id = i.id AND d.position = i.position
 WHERE i.job = :job
   AND i.position BETWEEN :lo AND :hi
 ORDER BY d.position, d.id

-- name: outcomes
SELECT d.state, count(*)
  FROM postroom_job_item i
  JOIN postroom_dead_letter d ON d.source = :source AND d.id = i.id AND d.position = i.position
 WHERE i.job = :job AND i.position <= :position
 GROUP BY d.state

-- name: died_again
SELECT 'dead', count(*)
  FROM postroom_job_item i
  JOIN postroom_dead_letter d ON d.source = 'outbox' AND d.id = i.id AND d.state = 'dead'
  JOIN postroom_job j ON j.id = i.job
 WHERE i.job = :job AND i.position <= :position
   AND d.died_at >= j.created_at

-- name: archive_page
SELECT a.id, a.position, a.topic, a.`key`
  FROM postroom_job_item i
  JOIN postroom_archive a ON a.id = i.id AND a.position = i.position
 WHERE i.job = :job
   AND i.position BETWEEN :lo AND :hi
 ORDER BY a.position, a.id

-- name: count_replay
UPDATE postroom_archive SET redrives = redrives + 1
 WHERE id = :id AND position = :position

-- name: replay
INSERT INTO postroom_outbox (lane, id, topic, `key`, type, aggregate_type, aggregate_id, content_type,
       headers, payload, size, redrives, created_at)
SELECT :lane, id, :topic, `key`, type, aggregate_type, aggregate_id, content_type, headers, payload,
       size, redrives, created_at
  FROM postroom_archive WHERE id = :id AND position = :position
