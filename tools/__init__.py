"""Tools of a checkout, never installed: `drill` injects faults into a whole Slotkeeper, `benchmarks` measures it,
`reference` writes the reference pages of its documents.

`cluster` starts the processes that both of them, and the tests, run against.
"""
