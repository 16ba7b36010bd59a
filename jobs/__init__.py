"""jobs: what a job is, the durable record.  No Redis, Celery, Flask or HTTP in here.

The life of a job
    states       states, reasons, and the table of transitions     record    the values that are handed around
    moves        what each transition changes: one UPDATE each      store     the only writer of a job's state
    events       one for each transition                            outbox    the same, read forward
    tail         the same as it grows, nothing passed over
    idempotency  which job a client's key names                     removal   deleting for good
    listings     searches that answer many jobs                     ledger    the balance of all jobs
    webhooks, tellings  ends that somebody shall hear of            withheld  slots whose server has not let go

What operators change
    catalog      models, their configuration, servers               config    settings, and a model's configuration
    tenants      who may come in                                    rotations webhook secrets
    descriptions how servers are spoken to                          secrets   what descriptions name, sealed
    policies     whose turn it is, and what is said of it

The database
    db           group commit                                       writer    the connection that it writes on
    prepared     statements compiled once                           models    the tables
    engines, postgresql  how connections are made, and how long anything takes
    fate         a COMMIT without an answer                         clock, steady_time  one time for all processes

Small things: errors, home (private folders), logs, light (a smaller structlog), once, crash (points named for tests).
"""
