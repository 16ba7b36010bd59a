"""routing: which job goes where, and when.

Rules in policies/ are pure.  Only queues, leases, slots and fleet touch Redis.
May import jobs; never tasks, app, celery, flask or requests (setup.cfg, importlinter).
"""
