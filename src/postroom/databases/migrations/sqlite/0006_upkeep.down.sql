DROP TABLE postroom_redrive_pace;
DROP TABLE postroom_consumer;
ALTER TABLE postroom_lane DROP COLUMN lease_us;
ALTER TABLE postroom_job DROP COLUMN lease_us;
ALTER TABLE postroom_idempotency_key DROP COLUMN lease_us;
ALTER TABLE postroom_inbox_held DROP COLUMN lease_us;
UPDATE postroom_meta SET value = '5' WHERE name = 'schema_version';
