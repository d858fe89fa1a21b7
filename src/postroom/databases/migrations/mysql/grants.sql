-- Four roles with no more than their work needs. Run in the database that holds the tables, as a
-- user who may create roles; run again after an upgrade. Then give them out:
-- GRANT {publisher} TO your_app; SET DEFAULT ROLE {publisher} FOR your_app;
-- Installing and upgrading need the owner; none of these roles can change the schema.
CREATE ROLE IF NOT EXISTS {publisher};
CREATE ROLE IF NOT EXISTS {relay};
CREATE ROLE IF NOT EXISTS {consumer};
CREATE ROLE IF NOT EXISTS {operator};

GRANT SELECT ON postroom_meta TO {publisher}, {relay}, {operator};

-- The publisher adds messages and cannot read one back, change it or take it away. What else it may
-- do serves two questions: who holds this dedup key, and was this id committed?
GRANT INSERT ON postroom_outbox TO {publisher};
GRANT INSERT ON postroom_delayed TO {publisher};
GRANT INSERT ON postroom_dedup TO {publisher};
GRANT SELECT, INSERT, UPDATE ON postroom_key_lock TO {publisher};
GRANT SELECT (dedup_key, message_id), UPDATE (dedup_key, message_id)
    ON postroom_dedup TO {publisher};
GRANT SELECT (id) ON postroom_outbox TO {publisher};
GRANT SELECT (id) ON postroom_delayed TO {publisher};
GRANT SELECT (id) ON postroom_held TO {publisher};
GRANT SELECT (id) ON postroom_archive TO {publisher};
GRANT SELECT (id) ON postroom_dead_letter TO {publisher};

-- With `inbox.once` it writes down what it has handled.
GRANT SELECT, INSERT ON postroom_inbox TO {publisher};

-- With idempotency keys it remembers what it has answered, and forgets nothing.
GRANT SELECT, INSERT, UPDATE ON postroom_idempotency_key TO {publisher};

-- It enters requests in the ledger and reads what became of them; only a relay or a person says so.
GRANT SELECT, INSERT ON postroom_ledger TO {publisher};

-- The consumer may publish too, and keeps what waits to be handled again.
GRANT {publisher} TO {consumer};
GRANT UPDATE ON postroom_inbox TO {consumer};
GRANT SELECT, INSERT, UPDATE, DELETE ON postroom_inbox_held TO {consumer};
GRANT SELECT, INSERT, UPDATE, DELETE ON postroom_seat TO {consumer};
GRANT SELECT, INSERT, UPDATE ON postroom_consumer TO {consumer};
GRANT SELECT, INSERT, UPDATE, DELETE ON postroom_worker TO {consumer};
GRANT SELECT, INSERT, UPDATE ON postroom_dead_letter TO {consumer};

-- The relay moves messages between the tables, and owns lanes but cannot pause them.
GRANT SELECT, INSERT, DELETE ON postroom_outbox TO {relay};
GRANT SELECT, INSERT, DELETE ON postroom_delayed TO {relay};
GRANT SELECT, INSERT, DELETE ON postroom_lane_batch TO {relay};
GRANT SELECT, INSERT, UPDATE, DELETE ON postroom_held TO {relay};
GRANT SELECT, INSERT, UPDATE, DELETE ON postroom_dead_letter TO {relay};
GRANT SELECT, INSERT, UPDATE, DELETE ON postroom_worker TO {relay};
GRANT SELECT, INSERT, UPDATE, DELETE ON postroom_archive TO {relay};
GRANT SELECT, DELETE ON postroom_dedup TO {relay};
GRANT SELECT, DELETE ON postroom_inbox TO {relay};
-- What a consumer still holds is not forgotten.
GRANT SELECT ON postroom_inbox_held TO {relay};
GRANT SELECT, DELETE ON postroom_job TO {relay};
GRANT SELECT, DELETE ON postroom_job_item TO {relay};
GRANT SELECT, DELETE ON postroom_key_lock TO {relay};
GRANT SELECT (scope, operation, `key`, status, mode, epoch, locked_until, lease_us, recovery_point,
              expires_at),
    UPDATE (status, locked_until, error), DELETE
    ON postroom_idempotency_key TO {relay};
GRANT SELECT, UPDATE (owner, epoch, lease_until, lease_us) ON postroom_lane TO {relay};
GRANT INSERT, UPDATE ON postroom_meta TO {relay};
GRANT SELECT, UPDATE ON postroom_ledger TO {relay};

-- The operator sees everything, repairs messages, and leaves a trace nobody can change.
GRANT SELECT, INSERT, DELETE ON postroom_outbox TO {operator};
GRANT SELECT, INSERT, DELETE ON postroom_delayed TO {operator};
GRANT SELECT, INSERT, UPDATE, DELETE ON postroom_held TO {operator};
GRANT SELECT, INSERT, UPDATE, DELETE ON postroom_inbox_held TO {operator};
GRANT SELECT, INSERT, UPDATE, DELETE ON postroom_dead_letter TO {operator};
GRANT SELECT ON postroom_seat TO {operator};
GRANT SELECT, DELETE ON postroom_consumer TO {operator};
GRANT SELECT, UPDATE ON postroom_lane TO {operator};
GRANT SELECT, UPDATE ON postroom_ledger TO {operator};
GRANT SELECT, INSERT ON postroom_audit TO {operator};
GRANT INSERT ON postroom_audit TO {relay};
GRANT INSERT ON postroom_audit TO {consumer};
GRANT SELECT, INSERT, UPDATE ON postroom_redrive_pace TO {relay};
GRANT SELECT, INSERT, UPDATE ON postroom_redrive_pace TO {consumer};
GRANT SELECT, INSERT, UPDATE ON postroom_redrive_pace TO {operator};
GRANT SELECT, UPDATE (redrives), DELETE ON postroom_archive TO {operator};
GRANT SELECT, INSERT, UPDATE, DELETE ON postroom_job TO {operator};
GRANT SELECT, INSERT, UPDATE, DELETE ON postroom_job_item TO {operator};
GRANT SELECT, DELETE ON postroom_dedup TO {operator};
GRANT SELECT, DELETE ON postroom_inbox TO {operator};
GRANT SELECT, UPDATE, DELETE ON postroom_idempotency_key TO {operator};
GRANT SELECT ON postroom_key_lock TO {operator};
GRANT SELECT ON postroom_lane_batch TO {operator};
GRANT SELECT, DELETE ON postroom_worker TO {operator};
