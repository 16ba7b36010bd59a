"""conform: the slot protocol (docs/slot-protocol.md) as checks that any server can be put to, over HTTP alone.

gate     where runs of the server wait until a check lets them go     checks   one function for each clause
stage    one server, one gate, and what can be done with both         run      carried out, told clause by clause
reference  the reference server as a process, which can be killed and started again
"""

ABILITIES = ("cancel", "idempotency", "ids")
"""What the protocol leaves to a server to promise."""
