-- What MariaDB says differently.

-- name: entries
SELECT id, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', at), who, what, subject, why
  FROM postroom_audit
 WHERE id < :before
   AND (:who IS NULL OR who = :who)
   AND (:what IS NULL OR what = :what OR locate(concat(:what, '.'), what) = 1)
   AND (:subject IS NULL OR locate(:subject, subject) > 0)
   AND at >= '1970-01-01' + INTERVAL :since MICROSECOND
   AND at < '1970-01-01' + INTERVAL :until MICROSECOND
 ORDER BY id DESC LIMIT :rows
