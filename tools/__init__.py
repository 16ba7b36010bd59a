"""trials: Slotkeeper, and the servers that it speaks to, tried before anybody relies on them.

`simulate` plays days of a load in seconds on routing's own scripts; `drill` lets a whole Slotkeeper fail on purpose and
counts what came of every job; `conform` puts a server to the slot protocol.
"""
