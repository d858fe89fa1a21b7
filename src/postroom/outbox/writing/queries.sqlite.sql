-- Only what differs on SQLite, where times are microseconds and ids are text.

-- name: insert_outbox
INSERT INTO postroom_outbox (
    lane, id, topic, key, type, aggregate_type, aggregate_id,
    content_type, headers, payload, size, expires_at)
VALUES (
    :lane, :id, :topic, :key, :type, :aggregate_type, :aggregate_id,
    :content_type, :headers, :payload, :size, :expires_us)

-- name: insert_delayed
INSERT INTO postroom_delayed (
    lane, deliver_at, id, topic, key, type, aggregate_type, aggregate_id,
    content_type, headers, payload, size, expires_at)
VALUES (
    :lane, :deliver_us, :id, :topic, :key, :type, :aggregate_type, :aggregate_id,
    :content_type, :headers, :payload, :size, :expires_us)

-- name: lock_key
-- Nothing to lock: SQLite has one writer at a time, and it keeps the lock until its commit.
SELECT :topic, :key

-- name: claim_dedup_key
INSERT INTO postroom_dedup (dedup_key, message_id) VALUES (:dedup_key, :claim)
ON CONFLICT (dedup_key) DO NOTHING

-- name: read_dedup_key
SELECT message_id FROM postroom_dedup WHERE dedup_key = :dedup_key

-- name: name_dedup_holder
UPDATE postroom_dedup SET message_id = :id WHERE dedup_key = :dedup_key

-- name: claim_ids
INSERT INTO postroom_dedup (dedup_key, message_id) VALUES (:dedup_key, :claim)
ON CONFLICT (dedup_key) DO NOTHING

-- name: find_ids
SELECT dedup_key, message_id FROM postroom_dedup
 WHERE dedup_key IN (SELECT value FROM json_each(:names))

-- name: read_ids
SELECT dedup_key, message_id FROM postroom_dedup
 WHERE dedup_key IN (SELECT value FROM json_each(:names))

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
