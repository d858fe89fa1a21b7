-- Four roles with no more than their work needs. Run as the owner of the schema `postroom`, who
-- may create roles; run again after an upgrade. Then give them out: GRANT {publisher} TO your_app;
-- Installing and upgrading need the owner; none of these roles can change the schema.
DO $$ BEGIN
    CREATE ROLE {publisher} NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$;
DO $$ BEGIN
    CREATE ROLE {relay} NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$;
DO $$ BEGIN
    CREATE ROLE {consumer} NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$;
DO $$ BEGIN
    CREATE ROLE {operator} NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$;

GRANT USAGE ON SCHEMA postroom TO {publisher}, {relay}, {operator};
GRANT SELECT ON postroom.meta TO {publisher}, {relay}, {operator};

-- The publisher adds messages and cannot read one back, change it or take it away. What else it may
-- do serves two questions: who holds this dedup key, and was this id committed?
GRANT INSERT ON postroom.outbox, postroom.delayed, postroom.dedup TO {publisher};
GRANT SELECT (dedup_key, message_id), UPDATE (message_id) ON postroom.dedup TO {publisher};
GRANT SELECT (id)
    ON postroom.outbox, postroom.delayed, postroom.held, postroom.archive, postroom.dead_letter
    TO {publisher};

-- With `inbox.once` it writes down what it has handled.
GRANT SELECT, INSERT ON postroom.inbox TO {publisher};

-- With idempotency keys it remembers what it has answered, and forgets nothing.
GRANT SELECT, INSERT, UPDATE ON postroom.idempotency_key TO {publisher};

-- It enters requests in the ledger and reads what became of them; only a relay or a person says so.
GRANT SELECT, INSERT ON postroom.ledger TO {publisher};

-- The consumer may publish too, and keeps what waits to be handled again.
GRANT {publisher} TO {consumer};
GRANT UPDATE ON postroom.inbox TO {consumer};
GRANT SELECT, INSERT, UPDATE, DELETE ON postroom.inbox_held, postroom.seat, postroom.worker
    TO {consumer};
GRANT SELECT, INSERT, UPDATE ON postroom.consumer TO {consumer};
GRANT SELECT, INSERT, UPDATE ON postroom.dead_letter TO {consumer};

-- The relay moves messages between the tables, and owns lanes but cannot pause them.
GRANT SELECT, INSERT, DELETE ON postroom.outbox, postroom.delayed, postroom.lane_batch TO {relay};
GRANT SELECT, INSERT, UPDATE, DELETE
    ON postroom.held, postroom.dead_letter, postroom.worker TO {relay};
GRANT SELECT, DELETE ON postroom.dedup, postroom.inbox, postroom.job, postroom.job_item TO {relay};
-- What a consumer still holds is not forgotten.
GRANT SELECT ON postroom.inbox_held TO {relay};
GRANT SELECT (scope, operation, key, status, mode, epoch, locked_until, lease_us, recovery_point,
              expires_at),
      UPDATE (status, locked_until, error), DELETE ON postroom.idempotency_key
    TO {relay};
GRANT SELECT, INSERT ON postroom.archive TO {relay};
GRANT SELECT, DELETE ON postroom.archive_overflow TO {relay};
GRANT SELECT, UPDATE (owner, epoch, lease_until, lease_us) ON postroom.lane TO {relay};
GRANT INSERT, UPDATE ON postroom.meta TO {relay};
GRANT SELECT, UPDATE ON postroom.ledger TO {relay};
GRANT EXECUTE ON FUNCTION
    postroom.make_archive_days(integer), postroom.drop_archive_days(bigint) TO {relay};

-- The operator sees everything, repairs messages, and leaves a trace nobody can change.
GRANT SELECT ON ALL TABLES IN SCHEMA postroom TO {operator};
GRANT INSERT, DELETE ON postroom.outbox, postroom.delayed TO {operator};
GRANT INSERT, UPDATE, DELETE ON postroom.held, postroom.inbox_held, postroom.dead_letter
    TO {operator};
GRANT UPDATE (redrives) ON postroom.archive TO {operator};
GRANT INSERT, UPDATE, DELETE ON postroom.job, postroom.job_item TO {operator};
GRANT DELETE ON postroom.dedup, postroom.inbox, postroom.archive_overflow, postroom.worker,
    postroom.consumer TO {operator};
GRANT UPDATE, DELETE ON postroom.idempotency_key TO {operator};
GRANT UPDATE ON postroom.lane, postroom.ledger TO {operator};
GRANT INSERT ON postroom.audit TO {operator}, {relay}, {consumer};
GRANT SELECT, INSERT, UPDATE ON postroom.redrive_pace TO {relay}, {consumer}, {operator};
GRANT EXECUTE ON FUNCTION
    postroom.make_archive_days(integer), postroom.drop_archive_days(bigint) TO {operator};
