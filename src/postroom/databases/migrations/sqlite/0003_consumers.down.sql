DROP TABLE postroom_inbox_held;
DROP TABLE postroom_seat;
UPDATE postroom_meta SET value = '2' WHERE name = 'schema_version';
