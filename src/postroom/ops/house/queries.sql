-- What those who look after the house ask. What is asked often is bounded or goes by an index.

-- ── status ──────────────────────────────────────────────────────────────────────────────────────

-- name: ages
-- Milliseconds since the oldest pending and the oldest held message were published, and by how much
-- the first delayed message is overdue. The first of each lane is its oldest.
SELECT CAST(extract(epoch FROM clock_timestamp() - min(o.created_at)) * 1000 AS bigint),
       CAST(extract(epoch FROM clock_timestamp() - min(h.created_at)) * 1000 AS bigint),
       CAST(extract(epoch FROM clock_timestamp() - min(d.deliver_at)) * 1000 AS bigint)
  FROM postroom.lane l
  LEFT JOIN LATERAL (SELECT created_at FROM postroom.outbox
                      WHERE lane = l.lane ORDER BY position LIMIT 1) o ON true
  LEFT JOIN LATERAL (SELECT created_at FROM postroom.held
                      WHERE lane = l.lane ORDER BY position LIMIT 1) h ON true
  LEFT JOIN LATERAL (SELECT deliver_at FROM postroom.delayed
                      WHERE lane = l.lane ORDER BY deliver_at, id LIMIT 1) d ON true

-- name: held_keys
-- Keys that wait for the next attempt of their head, and keys that a dead letter holds.
SELECT (SELECT count(*) FROM (SELECT 1 FROM postroom.held WHERE next_attempt_at IS NOT NULL
                               LIMIT CAST(:most AS bigint)) h),
       (SELECT count(*) FROM (SELECT holds_key FROM postroom.dead_letter WHERE state = 'dead'
                               LIMIT CAST(:most AS bigint)) d WHERE d.holds_key)

-- name: workers
SELECT incarnation, kind, name,
       CAST(extract(epoch FROM clock_timestamp() - seen_at) * 1000 AS bigint),
       CAST(extract(epoch FROM clock_timestamp() - started_at) * 1000 AS bigint),
       CAST(extract(epoch FROM seen_at) * 1000 AS bigint), report
  FROM postroom.worker ORDER BY started_at, incarnation LIMIT 1000
