-- What tests look at and change, on the connection they are given.

-- name: outbox_seen
SELECT CAST(id AS text), topic, key, type, aggregate_type, aggregate_id, content_type, headers,
       payload, CAST(extract(epoch FROM expires_at) * 1000000 AS bigint), CAST(NULL AS bigint),
       CAST(coalesce(expires_at <= clock_timestamp(), false) AS int), 1
  FROM postroom.outbox ORDER BY position

-- name: delayed_seen
SELECT CAST(id AS text), topic, key, type, aggregate_type, aggregate_id, content_type, headers,
       payload, CAST(extract(epoch FROM expires_at) * 1000000 AS bigint),
       CAST(extract(epoch FROM deliver_at) * 1000000 AS bigint),
       CAST(coalesce(expires_at <= clock_timestamp(), false) AS int),
       CAST(deliver_at <= clock_timestamp() AS int)
  FROM postroom.delayed ORDER BY deliver_at, id

-- name: take
-- Out of the outbox, or of where it was waiting for its time: as far as this test goes, delivered.
DELETE FROM postroom.outbox WHERE id = CAST(CAST(:id AS text) AS uuid);
DELETE FROM postroom.delayed WHERE id = CAST(CAST(:id AS text) AS uuid);

-- name: meta_forget
DELETE FROM postroom.meta WHERE name = :item

-- name: advance
-- As if so many microseconds had passed: every time that something waits for comes nearer by them.
UPDATE postroom.outbox SET expires_at = expires_at - CAST(:us AS bigint) * interval '1 microsecond'
 WHERE expires_at IS NOT NULL;
UPDATE postroom.delayed
   SET deliver_at = deliver_at - CAST(:us AS bigint) * interval '1 microsecond',
       expires_at = expires_at - CAST(:us AS bigint) * interval '1 microsecond';
UPDATE postroom.held
   SET next_attempt_at = next_attempt_at - CAST(:us AS bigint) * interval '1 microsecond',
       expires_at = expires_at - CAST(:us AS bigint) * interval '1 microsecond';
UPDATE postroom.lane
   SET lease_until = lease_until - CAST(:us AS bigint) * interval '1 microsecond'
 WHERE lease_until IS NOT NULL;
UPDATE postroom.worker SET seen_at = seen_at - CAST(:us AS bigint) * interval '1 microsecond';
UPDATE postroom.dedup SET created_at = created_at - CAST(:us AS bigint) * interval '1 microsecond';
