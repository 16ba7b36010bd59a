"""jobs: what a job is, the durable record.  No Redis, Celery, Flask or HTTP in here."""
