"""Maintenance: bring Redis to what the record says, and both to what really happens.

    room.py         the waiting room against the record: sweep, rebuild, reconcile
    timekeeping.py  due times, deadlines, retention
    reaper.py       leases whose holder is gone
    servers.py      what the servers say of themselves

Every function may run twice at once, late, or not at all for a while: each act in it is guarded by itself.
"""

from routing.reconcile.reaper import Patience, reap
from routing.reconcile.room import rebuild, reconcile, refresh_fleet, sweep
from routing.reconcile.servers import free_ghosts, heed_reports, note_health, suspects, urgent_servers
from routing.reconcile.timekeeping import expire_overdue, promote_due, purge

__all__ = [
    "Patience",
    "expire_overdue",
    "free_ghosts",
    "heed_reports",
    "note_health",
    "promote_due",
    "purge",
    "reap",
    "rebuild",
    "reconcile",
    "refresh_fleet",
    "suspects",
    "sweep",
    "urgent_servers",
]
