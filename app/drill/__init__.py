"""drill: proof that nothing is lost and nothing runs twice at once, for anybody to repeat.

It starts a whole Slotkeeper, submits jobs, kills and stops what can be killed and stopped by a printed seed, and
compares in the end what clients were promised with what the servers did.  `checker` judges and is pure, `schedule`
decides which faults come when and is pure, `stack` runs the processes, `clients` submit, `launcher` is the order of
it all, `card` says what came of it.
"""
