"""jobs: what a job is, the durable record.

    states       states, reasons, and the table of transitions     record       the values that are handed around
    moves        what each transition changes: one UPDATE each     store        the only writer of a job's state
    models       the tables of jobs                                events       one for each transition
    idempotency  which job a client's key names                    owed         what an ended job owes to others
    withheld     slots whose server has not let go                 listings     searches that answer many jobs
    counters     what the ledger must not miss                     names        of models, that are closed
    files        in a result: pictures and others                  run_times    what the latest runs took
    short_ids    a job by a part of its id

No Redis, Celery, Flask or HTTP in here.
"""
