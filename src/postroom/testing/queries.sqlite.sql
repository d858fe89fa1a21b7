-- name: outbox_seen
SELECT id, topic, key, type, aggregate_type, aggregate_id, content_type, headers, payload,
       expires_at, NULL, COALESCE(expires_at <= NOW_US, 0), 1
  FROM postroom_outbox ORDER BY position

-- name: delayed_seen
SELECT id, topic, key, type, aggregate_type, aggregate_id, content_type, headers, payload,
       expires_at, deliver_at, COALESCE(expires_at <= NOW_US, 0), deliver_at <= NOW_US
  FROM postroom_delayed ORDER BY deliver_at, id

-- name: take
DELETE FROM postroom_outbox WHERE id = :id;
DELETE FROM postroom_delayed WHERE id = :id;

-- name: advance
UPDATE postroom_outbox SET expires_at = expires_at - :us WHERE expires_at IS NOT NULL;
UPDATE postroom_delayed SET deliver_at = deliver_at - :us, expires_at = expires_at - :us;
UPDATE postroom_held SET next_attempt_at = next_attempt_at - :us, expires_at = expires_at - :us;
UPDATE postroom_lane SET lease_until = lease_until - :us WHERE lease_until IS NOT NULL;
UPDATE postroom_worker SET seen_at = seen_at - :us;
UPDATE postroom_dedup SET created_at = created_at - :us;
