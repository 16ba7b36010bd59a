"""Celery's extension points that Slotkeeper uses.  The files without a folder are in this one.

"Page" is the page of Celery's documentation that describes the extension point.

| extension point | page | file | why |
|---|---|---|---|
| setting `worker_pool` | Configuration and defaults | pool.py | a run is a coroutine; Celery's pools call functions |
| setting `worker_consumer` | Configuration and defaults | consumer.py | a malformed message would stop the worker |
| setting `broker_transport` | Configuration and defaults | transport.py | so would one that kombu cannot decode |
| boot steps of the consumer | Extensions and Bootsteps | bootsteps.py | each model has a queue, also if added later |
| boot steps of the worker | Extensions and Bootsteps | bootsteps.py | a worker runs beat, and notices if it ends |
| `app.user_options` | Extensions and Bootsteps | tasks/celery_app.py | the worker's option `--embedded-beat` |
| remote control commands | Workers Guide | control.py | a revoke cancels the job; `inspect active` shows runs |
| signals | Signals | signal_handlers.py, bootsteps.py | logs, start-up checks, liveness; draining on shutdown |
| `Task.apply_async` | Tasks | tasks/inference.py | a call submits a job to the database, not a message |
| `Task.Request` | Tasks | tasks/inference.py | a wake-up that is delayed or dropped holds a slot |
| `autoretry_for`, `retry_backoff` … | Tasks | tasks/retries.py | `task_annotations` apply to the retries of jobs |
| setting `beat_scheduler` | Periodic Tasks | tasks/beat.py | one message for all tasks that are due |
| subclass of `schedule` | API reference: celery.schedules | tasks/beat.py | a monotonic clock; aligned periods |
| `app.events.Dispatcher` | API reference: celery.events | tasks/relay/sinks/task_events.py | all jobs have events |

Celery's documentation does not cover two uses in transport.py:

- kombu has no documented hook for messages that it cannot decode, so private methods are overridden.
  test_private_names.py lists them with the reason.
- `compression.register`, in kombu's API reference, replaces the decompressors by bounded ones, for every broker.

canary.py is no extension point: it is a task with one queue for each worker, which the consumer's boot step starts.
"""
