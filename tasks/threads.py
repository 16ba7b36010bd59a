"""Background threads: vital ones, queues of work, and functions that run on request.

A vital thread that fails ends its process, and the supervisor starts it again.  A worker's leases expire then, and
other workers go on with its runs.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue
from typing import Generic, TypeVar

import structlog

from slotkeeper import logs

log = structlog.get_logger(__name__)

T = TypeVar("T")


def run_or_end_process(name: str, function: Callable[[], object]) -> None:
    """Call `function`; if it raises, log that under this name and end the process with status 70."""
    try:
        function()
    except BaseException:
        try:
            log.critical("thread_failed", thread=name, exc_info=True)
            logs.flush()
        finally:
            os._exit(os.EX_SOFTWARE)


def start_vital_thread(name: str, run: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread that runs `run`; if that raises, the process ends with status 70.

    Raises RuntimeError: no thread can be started now.
    """
    thread = threading.Thread(target=run_or_end_process, args=(name, run), name=name, daemon=True)
    thread.start()
    return thread


class WorkQueue(Generic[T]):
    """Hands items to a function in a background thread, in their order.

    The thread starts with the first item.  It is a daemon: a ThreadPoolExecutor would be joined when the process ends,
    and would wait for a broker that is away.

    handle: is given at most `batch` items at once; what it raises is logged.  max_pending: items that may wait; 0: any
    number.
    """

    def __init__(self, name: str, handle: Callable[[list[T]], object], *, max_pending: int = 0, batch: int = 1) -> None:
        self.name, self._handle, self._batch = name, handle, batch
        self._items: Queue[T] = Queue(max_pending)
        self._is_started = threading.Lock()

    @property
    def is_empty(self) -> bool:
        return self._items.empty()

    def put(self, item: T) -> None:
        """Add an item.  Raises Full: too many wait; RuntimeError: no thread can be started now."""
        if self._is_started.acquire(blocking=False):
            try:
                threading.Thread(target=self._run, name=self.name, daemon=True).start()
            except RuntimeError:
                self._is_started.release()
                raise
        self._items.put_nowait(item)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all items have been handled; False: that takes longer."""
        with self._items.all_tasks_done:
            return self._items.all_tasks_done.wait_for(lambda: not self._items.unfinished_tasks, timeout_s)

    def _run(self) -> None:
        while True:
            items = [self._items.get()]
            with suppress(Empty):
                while len(items) < self._batch:
                    items.append(self._items.get_nowait())
            try:
                self._handle(items)
            except Exception as error:
                log.error("queued_work_failed", queue=self.name, count=len(items), error=repr(error))
            finally:
                for _ in items:
                    self._items.task_done()


class BackgroundTask:
    """Runs a function in a background thread on request.  Requests during a run lead to one more run."""

    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self.name, self._function = name, function
        self._is_requested = self._is_running = False
        self._lock = threading.Lock()

    def request(self) -> None:
        """Have the function run soon.  If no thread can be started now, the next request runs it."""
        with self._lock:
            self._is_requested = True
            if self._is_running:
                return
            self._is_running = True
        try:
            start_vital_thread(self.name, self._run)
        except RuntimeError as error:
            log.warning("background_task_postponed", what=self.name, error=str(error))
            with self._lock:
                self._is_running = False

    def _run(self) -> None:
        while self._take_request():
            try:
                self._function()
            except Exception:
                log.exception("background_task_run_failed", what=self.name)

    def _take_request(self) -> bool:
        with self._lock:
            self._is_running, self._is_requested = self._is_requested, False
            return self._is_running
