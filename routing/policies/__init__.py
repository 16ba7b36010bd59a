"""policies: the rules, as pure functions of plain values and `now`.  No Redis, no SQL, no clock of their own.

`admission` how many may wait, `order` which lane a job waits in, `placement` which server suits it, `verdict` what an
outcome means, `retry` when to try again, `identity` what a server says it runs, held against leases.
"""
