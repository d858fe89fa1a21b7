-- Only what differs on MariaDB and MySQL. VALUES holds bare parameters, because only then do the
-- drivers write many rows as one statement; so times come as UTC text.

-- name: insert_outbox
INSERT INTO postroom_outbox (
    lane, id, topic, `key`, type, aggregate_type, aggregate_id,
    content_type, headers, payload, size, expires_at)
VALUES (
    :lane, :id, :topic, :key, :type, :aggregate_type, :aggregate_id,
    :content_type, :headers, :payload, :size, :expires_utc)

-- name: insert_delayed
INSERT INTO postroom_delayed (
    lane, deliver_at, id, topic, `key`, type, aggregate_type, aggregate_id,
    content_type, headers, payload, size, expires_at)
VALUES (
    :lane, :deliver_utc, :id, :topic, :key, :type, :aggregate_type, :aggregate_id,
    :content_type, :headers, :payload, :size, :expires_utc)

-- name: lock_key
-- Takes the exclusive lock at once. INSERT IGNORE would take a shared one where the row exists, and
-- two writers that then want the exclusive one would deadlock. Only when the very first writer of a
-- key rolls back while several wait does InnoDB still choose a victim.
INSERT INTO postroom_key_lock (topic, `key`) VALUES (:topic, :key)
ON DUPLICATE KEY UPDATE topic = topic

-- name: claim_dedup_key
-- A taken key is locked in share mode only, so that duplicates do not wait for each other.
INSERT IGNORE INTO postroom_dedup (dedup_key, message_id) VALUES (:dedup_key, :claim)

-- name: read_dedup_key
-- A locking read sees what is committed now; a repeatable-read snapshot would hide the other claim.
SELECT message_id FROM postroom_dedup WHERE dedup_key = :dedup_key LOCK IN SHARE MODE

-- name: name_dedup_holder
UPDATE postroom_dedup SET message_id = :id WHERE dedup_key = :dedup_key

-- name: claim_ids
INSERT IGNORE INTO postroom_dedup (dedup_key, message_id) VALUES (:dedup_key, :claim)

-- name: find_ids
-- Without a lock: two writers that lock the gap where their ids will stand would deadlock.
SELECT d.dedup_key, d.message_id
  FROM JSON_TABLE(:names, '$[*]' COLUMNS (
           name VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$')) n
  STRAIGHT_JOIN postroom_dedup d FORCE INDEX (PRIMARY) ON d.dedup_key = n.name

-- name: read_ids
-- A locking read sees what is committed now; a repeatable-read snapshot would hide the other claim.
-- By the key: a scan of a small table would lock the gaps of other writers, and deadlock with them.
SELECT d.dedup_key, d.message_id
  FROM JSON_TABLE(:names, '$[*]' COLUMNS (
           name VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$')) n
  STRAIGHT_JOIN postroom_dedup d FORCE INDEX (PRIMARY) ON d.dedup_key = n.name
   LOCK IN SHARE MODE

-- name: find_message
SELECT CASE
         WHEN EXISTS (SELECT 1 FROM postroom_archive WHERE id = :id)
           OR EXISTS (SELECT 1 FROM postroom_dead_letter WHERE id = :id)
           OR EXISTS (SELECT 1 FROM postroom_held WHERE id = :id)
           OR EXISTS (SELECT 1 FROM postroom_delayed WHERE id = :id)
           OR EXISTS (SELECT 1 FROM postroom_outbox WHERE id = :id)
         THEN 1 ELSE 0
       END,
       (SELECT value FROM postroom_meta WHERE name = 'keep_delivered_seconds')
