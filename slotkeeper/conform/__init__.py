"""Check any inference server against the slot protocol (docs/reference/slot-protocol.md), over HTTP alone."""

ABILITIES = ("cancel", "idempotency", "ids")
"""What the protocol leaves to a server to promise."""
