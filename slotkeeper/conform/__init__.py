"""Checks of any inference server against the slot protocol (docs/reference/slot-protocol.md), over HTTP alone."""

ABILITIES = ("cancel", "direct", "idempotency", "ids")
"""Optional abilities of a server."""
