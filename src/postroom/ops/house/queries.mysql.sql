-- What MariaDB says differently.

-- name: ages
SELECT TIMESTAMPDIFF(MICROSECOND, MIN((SELECT o.created_at FROM postroom_outbox o
        WHERE o.lane = l.lane ORDER BY o.position LIMIT 1)), UTC_TIMESTAMP(6)) DIV 1000,
       TIMESTAMPDIFF(MICROSECOND, MIN((SELECT h.created_at FROM postroom_held h
        WHERE h.lane = l.lane ORDER BY h.position LIMIT 1)), UTC_TIMESTAMP(6)) DIV 1000,
       TIMESTAMPDIFF(MICROSECOND, MIN((SELECT d.deliver_at FROM postroom_delayed d
        WHERE d.lane = l.lane ORDER BY d.deliver_at, d.id LIMIT 1)), UTC_TIMESTAMP(6)) DIV 1000
  FROM postroom_lane l

-- name: held_keys
-- Lane by lane through the index, or all that waits behind the heads would be read too.
SELECT (SELECT COUNT(*) FROM (
            SELECT 1 FROM postroom_lane l
              STRAIGHT_JOIN postroom_held h FORCE INDEX (held_due)
                 ON h.lane = l.lane AND h.next_attempt_at > '1970-01-01' LIMIT :most) h),
       (SELECT COUNT(*) FROM (SELECT holds_key FROM postroom_dead_letter WHERE state = 'dead'
                               LIMIT :most) d WHERE d.holds_key)

-- name: workers
SELECT incarnation, kind, name, TIMESTAMPDIFF(MICROSECOND, seen_at, UTC_TIMESTAMP(6)) DIV 1000,
       TIMESTAMPDIFF(MICROSECOND, started_at, UTC_TIMESTAMP(6)) DIV 1000,
       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', seen_at) DIV 1000, report
  FROM postroom_worker ORDER BY started_at, incarnation LIMIT 1000
