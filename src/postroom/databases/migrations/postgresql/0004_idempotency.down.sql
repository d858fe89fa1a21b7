DROP TABLE postroom.idempotency_key;
UPDATE postroom.meta SET value = '3' WHERE name = 'schema_version';
