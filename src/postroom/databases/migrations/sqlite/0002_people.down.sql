DROP TABLE postroom_job_item;
DROP TABLE postroom_job;
DROP TABLE postroom_inbox;
-- A plain DROP COLUMN would need SQLite 3.35.
CREATE TABLE postroom_worker_1 (
    incarnation TEXT PRIMARY KEY,
    kind        TEXT NOT NULL,
    name        TEXT NOT NULL,
    started_at  INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)),
    seen_at     INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER))
) WITHOUT ROWID;
INSERT INTO postroom_worker_1 (incarnation, kind, name, started_at, seen_at)
SELECT incarnation, kind, name, started_at, seen_at FROM postroom_worker;
DROP TABLE postroom_worker;
ALTER TABLE postroom_worker_1 RENAME TO postroom_worker;
DELETE FROM postroom_meta WHERE name = 'oldest_code';
UPDATE postroom_meta SET value = '1' WHERE name = 'schema_version';
