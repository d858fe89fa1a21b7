DROP TABLE IF EXISTS postroom_idempotency_key;
UPDATE postroom_meta SET value = '3' WHERE name = 'schema_version';
