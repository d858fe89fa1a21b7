"""A room of queries that try what links must be able to do."""
