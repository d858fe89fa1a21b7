-- What SQLite says differently.

-- name: ages
SELECT (NOW_US - (SELECT created_at FROM postroom_outbox ORDER BY position LIMIT 1)) / 1000,
       (NOW_US - (SELECT created_at FROM postroom_held ORDER BY position LIMIT 1)) / 1000,
       (NOW_US - (SELECT MIN((SELECT d.deliver_at FROM postroom_delayed d WHERE d.lane = l.lane
                               ORDER BY d.deliver_at LIMIT 1)) FROM postroom_lane l)) / 1000

-- name: held_keys
SELECT (SELECT COUNT(*) FROM (SELECT 1 FROM postroom_lane l JOIN postroom_held h
                                  ON h.lane = l.lane AND h.next_attempt_at IS NOT NULL
                               LIMIT :most) h),
       (SELECT COUNT(*) FROM (SELECT holds_key FROM postroom_dead_letter WHERE state = 'dead'
                               LIMIT :most) d WHERE d.holds_key)

-- name: workers
SELECT incarnation, kind, name, (NOW_US - seen_at) / 1000, (NOW_US - started_at) / 1000,
       seen_at / 1000, report
  FROM postroom_worker ORDER BY started_at, incarnation LIMIT 1000
