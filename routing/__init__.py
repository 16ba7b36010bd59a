"""routing: which job goes where, and when.

    dispatcher   the use cases: submit, start, settle, cancel, revive
    submission   what a client asked for, checked           admission    what must hold before it is written down
    gates        the bounds of admission, one file each     queues       the waiting room
    leases       the right to use a slot                    slots        which can be offered
    workers      who lives, and has room
    fleet        the registry as processes use it           registry     the same, brought to Redis
    runs         leases written again from the record       draining     slots that a server has not let go of
    scripts      lua/, called by name                       signatures   what a script takes and returns
    keys         the names of all keys in Redis             pipeline     Redis from an event loop
    suitability  what Redis must be set to
    outcome      what came of a call                        observer     who watches what happens, from outside
    reconcile    maintenance                                policies     the rules, pure
    seen, pulse  what sweeps remember, and that they go on  each         one fleet's error is no other's
    config       settings                                   exact        JSON with whole numbers of any length

May import jobs; never insight, tasks, app, celery, flask or requests (setup.cfg, importlinter).
"""
