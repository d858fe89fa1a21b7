-- Writing messages on the caller's own transaction. Values are text, integers and bytes, cast here,
-- so that no codec the caller has set on the connection is asked. Times are microseconds since 1970.

-- name: insert_outbox
-- The position is given by the database and never read back.
INSERT INTO postroom.outbox (
    lane, id, topic, key, type, aggregate_type, aggregate_id,
    content_type, headers, payload, size, expires_at)
VALUES (
    CAST(:lane AS smallint), CAST(CAST(:id AS text) AS uuid), CAST(:topic AS text),
    CAST(:key AS text), CAST(:type AS text), CAST(:aggregate_type AS text),
    CAST(:aggregate_id AS text), CAST(:content_type AS text), CAST(:headers AS text),
    CAST(:payload AS bytea), CAST(:size AS integer),
    timestamptz 'epoch' + CAST(:expires_us AS bigint) * interval '1 microsecond')

-- name: insert_outbox_arrays
-- only: postgresql
-- One statement for any number of messages. Positions are given in the order of the arrays: a
-- column's default is computed after the sort.
INSERT INTO postroom.outbox (
    lane, id, topic, key, type, aggregate_type, aggregate_id,
    content_type, headers, payload, size, expires_at)
SELECT m.lane, CAST(m.id AS uuid), m.topic, m.key, m.type, m.aggregate_type, m.aggregate_id,
       m.content_type, m.headers, m.payload, m.size,
       timestamptz 'epoch' + m.expires_us * interval '1 microsecond'
  FROM unnest(
    CAST(:lane AS smallint[]), CAST(:id AS text[]), CAST(:topic AS text[]), CAST(:key AS text[]),
    CAST(:type AS text[]), CAST(:aggregate_type AS text[]), CAST(:aggregate_id AS text[]),
    CAST(:content_type AS text[]), CAST(:headers AS text[]), CAST(:payload AS bytea[]),
    CAST(:size AS integer[]), CAST(:expires_us AS bigint[])
  ) WITH ORDINALITY AS m (
    lane, id, topic, key, type, aggregate_type, aggregate_id,
    content_type, headers, payload, size, expires_us, place)
 ORDER BY m.place

-- name: insert_delayed
INSERT INTO postroom.delayed (
    lane, deliver_at, id, topic, key, type, aggregate_type, aggregate_id,
    content_type, headers, payload, size, expires_at)
VALUES (
    CAST(:lane AS smallint),
    timestamptz 'epoch' + CAST(:deliver_us AS bigint) * interval '1 microsecond',
    CAST(CAST(:id AS text) AS uuid), CAST(:topic AS text),
    CAST(:key AS text), CAST(:type AS text), CAST(:aggregate_type AS text),
    CAST(:aggregate_id AS text), CAST(:content_type AS text), CAST(:headers AS text),
    CAST(:payload AS bytea), CAST(:size AS integer),
    timestamptz 'epoch' + CAST(:expires_us AS bigint) * interval '1 microsecond')

-- name: insert_delayed_arrays
-- only: postgresql
-- One statement for any number of messages; what is delayed has no order among itself.
INSERT INTO postroom.delayed (
    lane, deliver_at, id, topic, key, type, aggregate_type, aggregate_id,
    content_type, headers, payload, size, expires_at)
SELECT m.lane, timestamptz 'epoch' + m.deliver_us * interval '1 microsecond',
       CAST(m.id AS uuid), m.topic, m.key, m.type, m.aggregate_type, m.aggregate_id,
       m.content_type, m.headers, m.payload, m.size,
       timestamptz 'epoch' + m.expires_us * interval '1 microsecond'
  FROM unnest(
    CAST(:lane AS smallint[]), CAST(:deliver_us AS bigint[]), CAST(:id AS text[]),
    CAST(:topic AS text[]), CAST(:key AS text[]), CAST(:type AS text[]),
    CAST(:aggregate_type AS text[]), CAST(:aggregate_id AS text[]),
    CAST(:content_type AS text[]), CAST(:headers AS text[]), CAST(:payload AS bytea[]),
    CAST(:size AS integer[]), CAST(:expires_us AS bigint[])
  ) AS m (
    lane, deliver_us, id, topic, key, type, aggregate_type, aggregate_id,
    content_type, headers, payload, size, expires_us)

-- name: lock_key
-- Writers of one key wait here for each other until they commit. A topic holds no space, so the two
-- together are one name; the seed keeps our locks apart from the application's own.
SELECT pg_advisory_xact_lock(
    hashtextextended(CAST(:topic AS text) || ' ' || CAST(:key AS text), 5063731127))

-- name: claim_dedup_key
-- Waits for another writer of the same key to end; a taken key is no error. Insert first, look
-- second: the other way round two writers would both find nothing.
INSERT INTO postroom.dedup (dedup_key, message_id)
VALUES (CAST(:dedup_key AS text), CAST(CAST(:claim AS text) AS uuid))
ON CONFLICT (dedup_key) DO NOTHING

-- name: read_dedup_key
SELECT CAST(message_id AS text) FROM postroom.dedup WHERE dedup_key = CAST(:dedup_key AS text)

-- name: name_dedup_holder
-- The claim was made under a name of its own where the caller chose the id; see `Item.claim`.
UPDATE postroom.dedup SET message_id = CAST(CAST(:id AS text) AS uuid)
 WHERE dedup_key = CAST(:dedup_key AS text)

-- name: claim_ids
-- Waits for another writer of the same id to end; a taken id does not raise. See ids.py.
INSERT INTO postroom.dedup (dedup_key, message_id)
VALUES (CAST(:dedup_key AS text), CAST(CAST(:claim AS text) AS uuid))
ON CONFLICT (dedup_key) DO NOTHING

-- name: claim_ids_arrays
-- only: postgresql
INSERT INTO postroom.dedup (dedup_key, message_id)
SELECT m.name, CAST(m.claim AS uuid)
  FROM unnest(CAST(:dedup_key AS text[]), CAST(:claim AS text[])) AS m (name, claim)
 ORDER BY m.name
ON CONFLICT (dedup_key) DO NOTHING

-- name: find_ids
SELECT dedup_key, CAST(message_id AS text) FROM postroom.dedup
 WHERE dedup_key IN (SELECT jsonb_array_elements_text(CAST(CAST(:names AS text) AS jsonb)))

-- name: read_ids
SELECT dedup_key, CAST(message_id AS text) FROM postroom.dedup
 WHERE dedup_key IN (SELECT jsonb_array_elements_text(CAST(CAST(:names AS text) AS jsonb)))

-- name: find_message
-- One statement, so one snapshot: a message on its way from table to table is found in one of them.
-- What has an index on the id is asked first.
SELECT CASE
         WHEN EXISTS (SELECT 1 FROM postroom.archive WHERE id = CAST(CAST(:id AS text) AS uuid))
           OR EXISTS (SELECT 1 FROM postroom.dead_letter WHERE id = CAST(CAST(:id AS text) AS uuid))
           OR EXISTS (SELECT 1 FROM postroom.held WHERE id = CAST(CAST(:id AS text) AS uuid))
           OR EXISTS (SELECT 1 FROM postroom.delayed WHERE id = CAST(CAST(:id AS text) AS uuid))
           OR EXISTS (SELECT 1 FROM postroom.outbox WHERE id = CAST(CAST(:id AS text) AS uuid))
         THEN 1 ELSE 0
       END,
       (SELECT value FROM postroom.meta WHERE name = 'keep_delivered_seconds')
