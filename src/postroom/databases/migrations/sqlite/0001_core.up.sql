-- The outbox and its side tables. Times are microseconds since 1970 in UTC; ids are text.
CREATE TABLE postroom_meta (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

-- Hot: rows are inserted by publishers, read and deleted by the relay that owns their lane, and
-- never updated. AUTOINCREMENT, so that a position is never used twice.
CREATE TABLE postroom_outbox (
    position       INTEGER PRIMARY KEY AUTOINCREMENT,
    lane           INTEGER NOT NULL CHECK (lane >= 0 AND lane < 16),
    id             TEXT NOT NULL,
    topic          TEXT NOT NULL,
    key            TEXT,
    type           TEXT NOT NULL,
    aggregate_type TEXT,
    aggregate_id   TEXT,
    content_type   TEXT NOT NULL,
    headers        TEXT,
    payload        BLOB NOT NULL,
    size           INTEGER NOT NULL,
    redrives       INTEGER NOT NULL DEFAULT 0,
    created_at     INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)),
    expires_at     INTEGER
);
CREATE INDEX postroom_outbox_lane ON postroom_outbox (lane, position);

-- Not due yet: has no place in its key's order until the relay moves it into the outbox.
CREATE TABLE postroom_delayed (
    lane           INTEGER NOT NULL CHECK (lane >= 0 AND lane < 16),
    deliver_at     INTEGER NOT NULL,
    id             TEXT NOT NULL,
    topic          TEXT NOT NULL,
    key            TEXT,
    type           TEXT NOT NULL,
    aggregate_type TEXT,
    aggregate_id   TEXT,
    content_type   TEXT NOT NULL,
    headers        TEXT,
    payload        BLOB NOT NULL,
    size           INTEGER NOT NULL,
    created_at     INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)),
    expires_at     INTEGER,
    PRIMARY KEY (lane, deliver_at, id)
);

-- Waiting: a failed message in its back-off and whatever of its key must not pass it. Only the
-- head of a key has next_attempt_at; a blocked head is a dead letter that holds its key.
CREATE TABLE postroom_held (
    position       INTEGER PRIMARY KEY,
    lane           INTEGER NOT NULL CHECK (lane >= 0 AND lane < 16),
    id             TEXT NOT NULL,
    topic          TEXT NOT NULL,
    key            TEXT,
    type           TEXT NOT NULL,
    aggregate_type TEXT,
    aggregate_id   TEXT,
    content_type   TEXT NOT NULL,
    headers        TEXT,
    payload        BLOB NOT NULL,
    size           INTEGER NOT NULL,
    redrives       INTEGER NOT NULL DEFAULT 0,
    created_at     INTEGER NOT NULL,
    expires_at     INTEGER,
    attempts       INTEGER NOT NULL DEFAULT 0,
    history        TEXT,
    error_code     TEXT,
    error          TEXT,
    next_attempt_at INTEGER,
    blocked        INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX postroom_held_key ON postroom_held (lane, topic, key, position);
CREATE INDEX postroom_held_due ON postroom_held (lane, next_attempt_at)
    WHERE next_attempt_at IS NOT NULL;

CREATE TABLE postroom_dedup (
    dedup_key  TEXT PRIMARY KEY,
    message_id TEXT NOT NULL,
    created_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER))
) WITHOUT ROWID;
CREATE INDEX postroom_dedup_age ON postroom_dedup (created_at);

CREATE TABLE postroom_lane (
    lane        INTEGER PRIMARY KEY CHECK (lane >= 0 AND lane < 16),
    owner       TEXT,
    epoch       INTEGER NOT NULL DEFAULT 0,
    lease_until INTEGER,
    paused      INTEGER NOT NULL DEFAULT 0
);
INSERT INTO postroom_lane (lane)
VALUES (0), (1), (2), (3), (4), (5), (6), (7), (8), (9), (10), (11), (12), (13), (14), (15);

-- What a relay is sending right now: written before the send, deleted when it is settled. A row
-- left behind by a dead relay makes its messages suspects.
CREATE TABLE postroom_lane_batch (
    lane        INTEGER NOT NULL,
    incarnation TEXT NOT NULL,
    batch       INTEGER NOT NULL,
    lo          INTEGER NOT NULL,
    hi          INTEGER NOT NULL,
    messages    INTEGER NOT NULL,
    alone       INTEGER NOT NULL,
    held        INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (lane, incarnation, batch)
) WITHOUT ROWID;

CREATE TABLE postroom_archive (
    day            TEXT NOT NULL,
    id             TEXT NOT NULL,
    topic          TEXT NOT NULL,
    key            TEXT,
    type           TEXT NOT NULL,
    aggregate_type TEXT,
    aggregate_id   TEXT,
    content_type   TEXT NOT NULL,
    headers        TEXT,
    payload        BLOB NOT NULL,
    size           INTEGER NOT NULL,
    lane           INTEGER NOT NULL,
    position       INTEGER NOT NULL,
    redrives       INTEGER NOT NULL,
    attempts       INTEGER NOT NULL,
    created_at     INTEGER NOT NULL,
    delivered_at   INTEGER NOT NULL,
    PRIMARY KEY (id, day)
);
CREATE INDEX postroom_archive_day ON postroom_archive (day);

CREATE TABLE postroom_dead_letter (
    source         TEXT NOT NULL,
    id             TEXT NOT NULL,
    topic          TEXT NOT NULL,
    key            TEXT,
    type           TEXT NOT NULL,
    aggregate_type TEXT,
    aggregate_id   TEXT,
    content_type   TEXT NOT NULL,
    headers        TEXT,
    payload        BLOB NOT NULL,
    size           INTEGER NOT NULL,
    lane           INTEGER NOT NULL,
    position       INTEGER NOT NULL,
    created_at     INTEGER NOT NULL,
    expires_at     INTEGER,
    state          TEXT NOT NULL CHECK (state IN ('dead', 'queued', 'resolved', 'discarded')),
    holds_key      INTEGER NOT NULL,
    error_code     TEXT NOT NULL,
    error          TEXT NOT NULL,
    attempts       INTEGER NOT NULL,
    history        TEXT NOT NULL,
    redrives       INTEGER NOT NULL DEFAULT 0,
    died_at        INTEGER NOT NULL,
    retried_at     INTEGER,
    ended_at       INTEGER,
    note           TEXT,
    PRIMARY KEY (source, id, position)
);
CREATE INDEX postroom_dead_letter_state ON postroom_dead_letter (state, died_at);

CREATE TABLE postroom_worker (
    incarnation TEXT PRIMARY KEY,
    kind        TEXT NOT NULL,
    name        TEXT NOT NULL,
    started_at  INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)),
    seen_at     INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER))
) WITHOUT ROWID;

CREATE TABLE postroom_audit (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    at      INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)),
    who     TEXT NOT NULL,
    what    TEXT NOT NULL,
    subject TEXT NOT NULL,
    why     TEXT
);

INSERT INTO postroom_meta (name, value) VALUES ('schema_version', '1');
