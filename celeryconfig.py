"""Celery's settings: broker, routes, beat's schedule.  One file for worker, beat and Flower.

A message is a wake-up and never the only copy of anything, so it is acknowledged early and may be lost.
Jobs wait in the record and in the waiting room, never as ETA messages in a worker's memory.
"""

from datetime import timedelta

from tasks.beat import QUEUE, beat_entries
from tasks.config import TaskSettings

_settings = TaskSettings()

broker_url = _settings.broker
# What is no message shall end no worker.  kombu takes no path of a class in a URL.
broker_transport = "tasks.extensions.transport:Transport" if broker_url.startswith(("redis://", "rediss://")) else None
result_backend = _settings.results
result_expires = timedelta(days=1)
# A backend that has fallen silent: nobody hangs on it for the default of two minutes.
redis_socket_timeout = 10
redis_socket_connect_timeout = 5
broker_connection_retry_on_startup = True
# A Redis that answers and refuses writes (READONLY, MISCONF, NOPERM) is waited for like one that is away.
broker_channel_error_retry = True
broker_connection_timeout = 3
broker_transport_options = {
    # On Redis a message whose worker died comes back after this time, and a bare client's is the only copy of its job.
    # It is acknowledged in milliseconds, after the job is stored; one that comes twice makes one job.
    "visibility_timeout": 40,
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

worker_consumer = "tasks.extensions.consumer:Consumer"
worker_pool = "tasks.extensions.pool:Pool"
worker_concurrency = _settings.threads
worker_prefetch_multiplier = 1
worker_disable_prefetch = broker_transport is not None  # Celery can do it with Redis alone.
worker_disable_rate_limits = True  # A wake-up that a worker holds back holds a slot.
worker_send_task_events = False  # The relay publishes them, also of jobs that wait (tasks/relay/sinks/task_events.py).
task_send_sent_event = False
worker_hijack_root_logger = False
worker_redirect_stdouts = False
worker_cancel_long_running_tasks_on_connection_loss = False
task_acks_late = False
task_track_started = False
task_create_missing_queues = True

# A bare client publishes `infer` to Celery's own default queue; workers admit it from there.
task_default_queue = "celery"
task_default_queue_type = task_create_missing_queue_type = _settings.broker_queues
broker_native_delayed_delivery_queue_type = _settings.broker_queues
task_routes = {"slotkeeper.canary": {"queue": "canary"}, "maintenance.*": {"queue": QUEUE}}

beat_scheduler = "tasks.beat:Scheduler"
beat_max_loop_interval = 1
beat_schedule = beat_entries()
