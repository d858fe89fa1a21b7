DROP TABLE IF EXISTS postroom_inbox_held;
DROP TABLE IF EXISTS postroom_seat;
UPDATE postroom_meta SET value = '2' WHERE name = 'schema_version';
