DROP TABLE postroom.inbox_held;
DROP TABLE postroom.seat;
UPDATE postroom.meta SET value = '2' WHERE name = 'schema_version';
