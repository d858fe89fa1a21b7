ALTER TABLE postroom.worker DROP COLUMN report;
DROP TABLE postroom.job_item;
DROP TABLE postroom.job;
DROP TABLE postroom.inbox;
DELETE FROM postroom.meta WHERE name = 'oldest_code';
UPDATE postroom.meta SET value = '1' WHERE name = 'schema_version';
