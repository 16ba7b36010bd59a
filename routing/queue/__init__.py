"""routing: whose turn it is, and which slot is taken.

    queues       the waiting room                           leases       the right to use a slot
    slots        which can be offered                       workers      who lives, and has room
    order        in which lane a job waits                  observer     who watches what happens, from outside
    config       settings

Its scripts stand in lua/.  No Celery, Flask or HTTP in here (setup.cfg, importlinter).
"""
