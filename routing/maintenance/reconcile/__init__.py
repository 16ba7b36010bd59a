"""Maintenance: bring Redis to what the record says, and both to what really happens.

    room.py         the waiting room against the record: sweep, rebuild, reconcile
    timekeeping.py  due times, deadlines, retention
    reaper.py       leases whose holder is gone
    servers.py      what the servers say of themselves
    removal.py      removals of models and servers

Every function may run twice at once, late, or not at all for a while: each act in it is guarded by itself.
"""

from routing.maintenance.deadlines import expire_deadlines, promote_due_jobs, purge_ended_jobs
from routing.maintenance.reaper import RenewalGrace, reap, reap_dead_workers
from routing.maintenance.server_checks import (
    apply_health,
    apply_reports,
    end_stale_runs,
    find_stale_runs,
    servers_to_check_now,
)
from routing.maintenance.sweep import rebuild_queue, reconcile, refresh_fleet, sweep

__all__ = [
    "RenewalGrace",
    "expire_deadlines",
    "end_stale_runs",
    "apply_reports",
    "apply_health",
    "promote_due_jobs",
    "purge_ended_jobs",
    "reap",
    "reap_dead_workers",
    "rebuild_queue",
    "reconcile",
    "refresh_fleet",
    "find_stale_runs",
    "sweep",
    "servers_to_check_now",
]
