-- What consumers have handled.

-- name: insert
-- Waits for whoever is inserting the same row: they commit, and we are a duplicate, or they do not.
INSERT INTO postroom.inbox (consumer, message_id, digest) VALUES (:consumer, :message_id, :digest)
ON CONFLICT DO NOTHING RETURNING 1

-- name: digest
SELECT digest FROM postroom.inbox WHERE consumer = :consumer AND message_id = :message_id

