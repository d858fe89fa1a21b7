-- What SQLite says differently.

-- name: entries
SELECT id, at, who, what, subject, why
  FROM postroom_audit
 WHERE id < :before
   AND (:who IS NULL OR who = :who)
   AND (:what IS NULL OR what = :what OR instr(what, :what || '.') = 1)
   AND (:subject IS NULL OR instr(subject, :subject) > 0)
   AND at >= :since AND at < :until
 ORDER BY id DESC LIMIT :rows
