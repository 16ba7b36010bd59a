"""tasks.worker: a worker process, and the runs that live in its event loop.

process      the worker as Celery knows it: it takes jobs, drains, ends
executor     one run, from the claim to the notification: read this first
own_run      one run, as the others share it         capacity    how many runs there are, and room for more
calls        how a run's server is called            runner      one run: called, polled, held
patient_io   the database is away: ask again         background  what is done beside the runs
engine       the event loop that runs live in        heartbeat   keeps leases alive
rights       whether a lease may still be used       poller      work that no message told of
inquiry      what the database says of runs          abandoned   answers of runs that were given up
"""
