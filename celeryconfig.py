"""Celery's settings: broker, routes, beat's schedule.  One file for worker, beat and Flower.

A message is a wake-up and never the only copy of anything, so it is acknowledged early and may be lost.
Jobs wait in the record and in the waiting room, never as ETA messages in a worker's memory.
"""

from datetime import timedelta

from tasks.beat import every
from tasks.config import TaskSettings

_settings = TaskSettings()

broker_url = _settings.broker
result_backend = _settings.results
result_expires = timedelta(days=1)
# A backend that has fallen silent: nobody hangs on it for the default of two minutes.
redis_socket_timeout = 10
redis_socket_connect_timeout = 5
broker_connection_retry_on_startup = True
broker_connection_timeout = 3
broker_transport_options = {
    "visibility_timeout": 3600,
    "priority_steps": [0, 3, 6, 9],
    # A broker that falls silent is noticed: by who publishes in seconds, by who consumes in a quarter of a minute.
    "socket_timeout": 3,
    "socket_connect_timeout": 3,
    "socket_keepalive": True,
    "health_check_interval": 5,
}

accept_content = ["json"]
task_serializer = "json"
result_serializer = "json"
timezone = "UTC"
enable_utc = True

worker_consumer = "tasks.consumer:Consumer"
worker_pool = "tasks.pool:Pool"
worker_concurrency = _settings.threads
worker_prefetch_multiplier = 1
worker_disable_prefetch = True
worker_disable_rate_limits = True  # A wake-up that a worker holds back holds a slot.
worker_send_task_events = False  # The relay publishes them, also of jobs that wait (tasks/sinks/task_events.py).
task_send_sent_event = False
worker_hijack_root_logger = False
worker_redirect_stdouts = False
worker_cancel_long_running_tasks_on_connection_loss = False
task_acks_late = False
task_track_started = False
task_create_missing_queues = True

# A bare client publishes `infer` to Celery's own default queue; workers admit it from there.
task_default_queue = "celery"
task_routes = {"slotkeeper.canary": {"queue": "canary"}, "maintenance.*": {"queue": "maintenance"}}


def _every(task: str, seconds: float, *args: object) -> dict[str, object]:
    """A beat entry.  It does not expire, which would compare two hosts' clocks; tasks/maintenance.py drops doubles."""
    return {"task": task, "schedule": every(seconds), "args": args}


beat_scheduler = "tasks.beat:Scheduler"
beat_max_loop_interval = 1
beat_schedule = {
    "sweep": _every("maintenance.sweep", 2),
    "keep-time": _every("maintenance.keep_time", 1),
    "reap": _every("maintenance.reap", 0.5),
    "reap-killed": _every("maintenance.reap_killed", 0.5),
    "watch-runs": _every("maintenance.watch_runs", 2),
    "check-servers": _every("maintenance.check_servers", 10),
    "check-urgent-servers": _every("maintenance.check_servers", 2, False),
    "sync-locks": _every("maintenance.sync_locks", 30),
    "reconcile": _every("maintenance.reconcile", 300),
    "scan-dlq": _every("maintenance.scan_dlq", 60),
    "count": _every("maintenance.count", 5),
    "check_invariants": _every("maintenance.check_invariants", 60),
    "tell-ends": _every("maintenance.tell_due", 5),
}
