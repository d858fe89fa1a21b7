ALTER TABLE postroom_worker DROP COLUMN IF EXISTS report;
DROP TABLE IF EXISTS postroom_job_item;
DROP TABLE IF EXISTS postroom_job;
DROP TABLE IF EXISTS postroom_inbox;
DELETE FROM postroom_meta WHERE name = 'oldest_code';
UPDATE postroom_meta SET value = '1' WHERE name = 'schema_version';
