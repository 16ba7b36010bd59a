"""Celery's settings: broker, routes, beat schedule.  Workers, beat and Flower load this file.

A wake-up message is never the only copy of a job, so it is acknowledged early and may be lost.
Jobs wait in the database and in the queue in Redis, never as ETA messages in a worker's memory.
"""

from datetime import timedelta

from tasks.beat import QUEUE, beat_entries
from tasks.config import TaskSettings

_settings = TaskSettings()

broker_url = _settings.broker
# This transport drops malformed messages, which would stop a worker.  A broker URL cannot name a transport class.
broker_transport = "tasks.extensions.transport:Transport" if broker_url.startswith(("redis://", "rediss://")) else None
result_backend = _settings.results
result_expires = timedelta(days=1)
# By default, a call of a result backend that has stopped responding blocks for two minutes.
redis_socket_timeout = 10
redis_socket_connect_timeout = 5
broker_connection_retry_on_startup = True
# Retry a Redis that responds but refuses writes (READONLY, MISCONF, NOPERM), like one that is unreachable.
broker_channel_error_retry = True
broker_connection_timeout = 3
broker_transport_options = {
    # After this time Redis delivers a dead worker's messages again.  A message of a bare client is the only copy of its
    # job.  It is acknowledged within milliseconds, after the job is stored; delivered twice, it makes one job.
    "visibility_timeout": 40,
    "priority_steps": [0, 3, 6, 9],
    # Detect a broker that has stopped responding: publishers within seconds, consumers within 15 s.
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
worker_disable_prefetch = broker_transport is not None  # Celery supports it only with Redis.
worker_disable_rate_limits = True  # A worker that delays a wake-up holds a slot.
worker_send_task_events = False  # The relay publishes them, for waiting jobs too: tasks/relay/sinks/task_events.py.
task_send_sent_event = False
worker_hijack_root_logger = False
worker_redirect_stdouts = False
worker_cancel_long_running_tasks_on_connection_loss = False
task_acks_late = False
task_track_started = False
task_create_missing_queues = True

# A client without this code publishes `infer` to Celery's default queue; a worker submits its job.
task_default_queue = "celery"
task_default_queue_type = task_create_missing_queue_type = _settings.broker_queues
broker_native_delayed_delivery_queue_type = _settings.broker_queues
task_routes = {"slotkeeper.canary": {"queue": "canary"}, "maintenance.*": {"queue": QUEUE}}

beat_scheduler = "tasks.beat:Scheduler"
beat_max_loop_interval = 1
beat_schedule = beat_entries()
