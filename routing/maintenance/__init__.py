"""upkeep: maintenance.  What was missed or lost is brought back, and what is over is cleared away.

    reconcile    the tasks of maintenance                   ledger       the balance of all jobs
    runs         leases written again from the record       draining     slots that a server has not let go of
    copies       the registry, brought to Redis             identity     what a server says it runs, held against leases
    pulse        that sweeps go on                          each         one fleet's error is no other's
    seen         what sweeps remember                       rooms        what it asks of rooms, and does there

Its scripts stand in lua/.  All of it stands above routing, which works without it until something is lost.
"""
