"""Maintenance of Redis and of runs: every function may run twice at once, late, or not at all for a while."""

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
    "apply_health",
    "apply_reports",
    "end_stale_runs",
    "expire_deadlines",
    "find_stale_runs",
    "promote_due_jobs",
    "purge_ended_jobs",
    "reap",
    "reap_dead_workers",
    "rebuild_queue",
    "reconcile",
    "refresh_fleet",
    "servers_to_check_now",
    "sweep",
]
