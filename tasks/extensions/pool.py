"""The worker's pool: a wake-up message starts a run in the event loop, and other tasks run in threads.

Celery's tracer is synchronous: it calls a function, and the task has ended when that returns.  A run is a coroutine
that waits for a server, so it is not traced.  The pool reports the wake-up as done, which acknowledges its message, and
then passes its offer to the event loop.  If the worker dies in between, the offer expires and is made again.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
from celery.concurrency.thread import TaskPool

from tasks import offer_messages
from tasks.offer_messages import is_wake_up

log = structlog.get_logger(__name__)

_MAX_THREADS = 64


class Pool(TaskPool):
    """`limit`: the maximum number of concurrent runs, and of other tasks, for which there are at most 64 threads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.executor = ThreadPoolExecutor(min(self.limit, _MAX_THREADS))

    @property
    def num_processes(self) -> int:
        """Return how many messages the worker may hold.

        Celery reads it if `worker_disable_prefetch` is set, and counts its own requests.  A run takes a place without a
        request: its message is acknowledged, or no message brought it.
        """
        return max(self.limit - _count_runs(), 0)

    @property
    def info(self) -> dict[str, Any]:
        """Return what `inspect stats` shows of the pool."""
        return {**super().info, "runs": _count_runs()}

    def on_apply(
        self,
        target: Any,
        args: Any = None,
        kwargs: Any = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Any:
        name, task_id, request = args[:3]
        if name != offer_messages.TASK or not is_wake_up(request):
            return super().on_apply(target, args, kwargs, callback, accept_callback, **options)
        if accept_callback is not None and callback is not None:
            accept_callback(os.getpid(), time.monotonic())
            callback((False, None, 0.0))  # (failed, result, seconds)
        _start_run(task_id, request)
        return None

    def on_stop(self) -> None:
        from tasks.worker.worker import this_worker

        if this_worker.created:
            this_worker().drain_and_close()
        super().on_stop()


def _start_run(task_id: str, request: Any) -> None:
    """Run the job of a wake-up's offer.  A message that is delivered twice finds no open offer, and has no effect."""
    from tasks.worker.worker import this_worker

    offer = offer_messages.read_offer(task_id, request["args"], request)
    if offer is None:
        log.warning("offer_message_unreadable", job_id=task_id)
    else:
        this_worker().executor.run_open_offer(offer)


def _count_runs() -> int:
    from tasks.worker.worker import this_worker

    return this_worker().runs if this_worker.created else 0
