"""The agent of a node: it connects to a gateway from behind NAT, runs jobs, and signs their results.

It serves the slot protocol (docs/reference/slot-protocol.md) over its own connection: what a gateway sends are HTTP
requests.  The package imports neither Redis, SQLAlchemy nor the rest of Slotkeeper.
"""
