-- name: outbox_seen
SELECT id, topic, `key`, type, aggregate_type, aggregate_id, content_type, headers, payload,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', expires_at), NULL,
       COALESCE(expires_at <= UTC_TIMESTAMP(6), 0), 1
  FROM postroom_outbox ORDER BY position

-- name: delayed_seen
SELECT id, topic, `key`, type, aggregate_type, aggregate_id, content_type, headers, payload,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', expires_at),
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', deliver_at),
       COALESCE(expires_at <= UTC_TIMESTAMP(6), 0), deliver_at <= UTC_TIMESTAMP(6)
  FROM postroom_delayed ORDER BY deliver_at, id

-- name: take
DELETE FROM postroom_outbox WHERE id = :id;
DELETE FROM postroom_delayed WHERE id = :id;

-- name: advance
UPDATE postroom_outbox SET expires_at = expires_at - INTERVAL :us MICROSECOND
 WHERE expires_at IS NOT NULL;
UPDATE postroom_delayed
   SET deliver_at = deliver_at - INTERVAL :us MICROSECOND,
       expires_at = expires_at - INTERVAL :us MICROSECOND;
UPDATE postroom_held
   SET next_attempt_at = next_attempt_at - INTERVAL :us MICROSECOND,
       expires_at = expires_at - INTERVAL :us MICROSECOND;
UPDATE postroom_lane SET lease_until = lease_until - INTERVAL :us MICROSECOND
 WHERE lease_until IS NOT NULL;
UPDATE postroom_worker SET seen_at = seen_at - INTERVAL :us MICROSECOND;
UPDATE postroom_dedup SET created_at = created_at - INTERVAL :us MICROSECOND;
