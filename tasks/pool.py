"""The pool of a worker, as Celery knows pools: jobs live in the event loop of this process, other tasks in threads."""

from collections.abc import Callable
from typing import Any

from celery.concurrency.thread import TaskPool

from tasks import messages
from tasks.wake_up import is_wake_up

_MOST_THREADS = 64


class Pool(TaskPool):
    """`limit`: how many jobs may be under way, and how many other tasks, though of those no more than 64."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.executor._max_workers = min(self.limit, _MOST_THREADS)  # type: ignore[attr-defined]

    def on_apply(
        self,
        target: Any,
        args: Any = None,
        kwargs: Any = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        **more: Any,
    ) -> Any:
        request = getattr(accept_callback, "__self__", None)
        if request is None or request.name != messages.TASK or not is_wake_up(request.request_dict):
            return super().on_apply(target, args, kwargs, callback, accept_callback, **more)
        from tasks.worker import this_worker

        this_worker().take(request)
        return None

    def on_stop(self) -> None:
        from tasks.worker import this_worker

        if this_worker.made:
            this_worker().end()
        super().on_stop()
