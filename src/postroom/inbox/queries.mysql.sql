-- What MariaDB says differently.

-- name: insert
-- What else IGNORE would pass over (values too long, or missing) was checked before.
INSERT IGNORE INTO postroom_inbox (consumer, message_id, digest)
VALUES (:consumer, :message_id, :digest) RETURNING 1

-- name: digest
-- A locking read, since a snapshot taken before the other's commit would not show its row.
SELECT digest FROM postroom_inbox
 WHERE consumer = :consumer AND message_id = :message_id LOCK IN SHARE MODE
