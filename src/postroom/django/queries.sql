-- What Django's tests ask besides the rooms' own queries.

-- name: empty
-- After a test that committed: the next one finds no messages.
DELETE FROM postroom.outbox;
DELETE FROM postroom.delayed;
DELETE FROM postroom.held;
DELETE FROM postroom.dead_letter;
DELETE FROM postroom.archive;
DELETE FROM postroom.dedup;
DELETE FROM postroom.lane_batch;

-- name: empty_people
-- The same for what version 2 added.
DELETE FROM postroom.inbox;
DELETE FROM postroom.job_item;
DELETE FROM postroom.job;

-- name: empty_consumers
-- The same for what version 3 added.
DELETE FROM postroom.inbox_held;
DELETE FROM postroom.seat;

-- name: empty_idempotency
-- The same for what version 4 added.
DELETE FROM postroom.idempotency_key;
