"""drill: proof that nothing is lost and nothing runs twice at once, for anybody to repeat.

It starts a whole Slotkeeper, submits jobs, lets things fail by a printed seed, and compares in the end what clients
were promised with what servers and receivers saw.

    pure       schedule (which faults come when), jobs, checker and accounts (what must not be), limits, recovery
    what runs  setting, stack, postgres, clocks, work, receivers
    faults     acts (what each does), faults (each at its time), proxy and wire (what a network does)
    the rest   clients submit, journals reads, truth compares leases with servers, launcher is the order of it all,
               card says what came of it
"""
