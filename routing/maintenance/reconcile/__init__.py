"""Maintenance: bring Redis to what the record says, and both to what really happens.

    room.py         the waiting room against the record: sweep, rebuild, reconcile
    timekeeping.py  due times, deadlines, retention
    reaper.py       leases whose holder is gone
    servers.py      what the servers say of themselves
    removal.py      removals of models and servers

Every function may run twice at once, late, or not at all for a while: each act in it is guarded by itself.
"""

from routing.maintenance.reconcile.reaper import Patience, reap, reap_killed
from routing.maintenance.reconcile.room import rebuild, reconcile, refresh_fleet, sweep
from routing.maintenance.reconcile.servers import free_stale_leases, heed_reports, note_health, suspects, urgent_servers
from routing.maintenance.reconcile.timekeeping import expire_overdue, promote_due, purge

__all__ = [
    "Patience",
    "expire_overdue",
    "free_stale_leases",
    "heed_reports",
    "note_health",
    "promote_due",
    "purge",
    "reap",
    "reap_killed",
    "rebuild",
    "reconcile",
    "refresh_fleet",
    "suspects",
    "sweep",
    "urgent_servers",
]
