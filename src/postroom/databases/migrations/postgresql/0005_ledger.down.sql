DROP TABLE postroom.ledger;
UPDATE postroom.meta SET value = '4' WHERE name = 'schema_version';
