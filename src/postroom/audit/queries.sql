-- The audit. Entries are read by their id, which grows with their time.

-- name: record
INSERT INTO postroom.audit (who, what, subject, why) VALUES (:who, :what, :subject, :why)

-- name: entries
SELECT id, CAST(extract(epoch FROM at) * 1000000 AS bigint), who, what, subject, why
  FROM postroom.audit
 WHERE id < CAST(:before AS bigint)
   AND (CAST(:who AS text) IS NULL OR who = CAST(:who AS text))
   AND (CAST(:what AS text) IS NULL OR what = CAST(:what AS text)
        OR starts_with(what, CAST(:what AS text) || '.'))
   AND (CAST(:subject AS text) IS NULL OR strpos(subject, CAST(:subject AS text)) > 0)
   AND at >= to_timestamp(0) + CAST(:since AS bigint) * interval '1 microsecond'
   AND at < to_timestamp(0) + CAST(:until AS bigint) * interval '1 microsecond'
 ORDER BY id DESC LIMIT CAST(:rows AS bigint)
