DROP TABLE IF EXISTS postroom_ledger;
UPDATE postroom_meta SET value = '4' WHERE name = 'schema_version';
