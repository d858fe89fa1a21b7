-- What SQLite says differently.

-- name: insert
INSERT INTO postroom_inbox (consumer, message_id, digest) VALUES (:consumer, :message_id, :digest)
ON CONFLICT DO NOTHING;
SELECT changes();
