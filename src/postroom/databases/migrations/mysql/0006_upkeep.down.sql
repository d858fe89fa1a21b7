DROP TABLE IF EXISTS postroom_redrive_pace;
DROP TABLE IF EXISTS postroom_consumer;
ALTER TABLE postroom_lane DROP COLUMN IF EXISTS lease_us;
ALTER TABLE postroom_job DROP COLUMN IF EXISTS lease_us;
ALTER TABLE postroom_idempotency_key DROP COLUMN IF EXISTS lease_us;
ALTER TABLE postroom_inbox_held DROP COLUMN IF EXISTS lease_us;
UPDATE postroom_meta SET value = '5' WHERE name = 'schema_version';
