"""Connect to SQLite or PostgreSQL and commit writes in groups; an unknown COMMIT is never called a failure."""
