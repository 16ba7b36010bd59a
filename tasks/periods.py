"""The maintenance tasks and their periods.  Probes read them, which do not load Celery."""

PERIODS_S = {
    "sweep": 2.0,
    "keep_time": 1.0,
    "reap": 0.5,
    "reap_killed": 0.5,
    "watch_runs": 2.0,
    "drive_batches": 2.0,
    "keep_nodes": 2.0,
    "check_servers": 10.0,
    "check_urgent_servers": 2.0,
    "validate_servers": 10.0,
    "sync_locks": 30.0,
    "reconcile": 300.0,
    "check_invariants": 60.0,
    "scan_dlq": 60.0,
    "count": 5.0,
    "keep_credits": 5.0,
    "tell_due": 5.0,
    "publish_task_events": 30.0,
}
"""The maintenance tasks, each a function of tasks/maintenance.py, and their periods in seconds.

Tasks that are due together are sent in one message.  They run one after another, the most frequent first.
"""
