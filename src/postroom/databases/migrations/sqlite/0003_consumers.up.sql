-- What consumers keep: whose turn it is to receive, and what waits to be handled again. Only new tables:
-- workers and publishers of earlier versions go on as before, and nothing that exists is rewritten.

-- Who receives from a source of a broker for a consumer. The epoch grows at every take-over; a handler's
-- transaction asks for the row it believes to be its own, so whoever wakes up late applies nothing.
CREATE TABLE postroom_seat (
    consumer TEXT NOT NULL,
    source   TEXT NOT NULL,
    owner    TEXT NOT NULL,
    epoch    INTEGER NOT NULL,
    taken_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)),
    PRIMARY KEY (consumer, source)
) WITHOUT ROWID;

-- Waiting in a consumer: a message whose handler failed, in its back-off, and whatever of its key must
-- not pass it. Only the head of a key has next_attempt_at; a blocked head is a dead letter that holds
-- its key, unless it was set aside. Positions are given by arrival.
CREATE TABLE postroom_inbox_held (
    position        INTEGER PRIMARY KEY AUTOINCREMENT,
    consumer        TEXT NOT NULL,
    message_id      TEXT NOT NULL,
    topic           TEXT NOT NULL,
    key             TEXT,
    type            TEXT NOT NULL,
    content_type    TEXT NOT NULL,
    headers         TEXT,
    payload         BLOB NOT NULL,
    size            INTEGER NOT NULL,
    redrives        INTEGER NOT NULL DEFAULT 0,
    held_at         INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)),
    attempts        INTEGER NOT NULL DEFAULT 0,
    history         TEXT,
    error_code      TEXT,
    error           TEXT,
    next_attempt_at INTEGER,
    blocked         INTEGER NOT NULL DEFAULT 0,
    aside           INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX postroom_inbox_held_id ON postroom_inbox_held (consumer, message_id);
CREATE INDEX postroom_inbox_held_key ON postroom_inbox_held (consumer, topic, key, position);
CREATE INDEX postroom_inbox_held_due ON postroom_inbox_held (consumer, next_attempt_at)
 WHERE next_attempt_at IS NOT NULL;

UPDATE postroom_meta SET value = '3' WHERE name = 'schema_version';
