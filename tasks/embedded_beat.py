"""Beat as a thread of the worker that does what it says: what is due is begun there, and no message is sent.

    celery -A tasks worker -Q maintenance --embedded-beat

Where one process of each kind is enough, that spares one of them, several messages a second, and the broker's help.
`celery -A tasks beat` is for those who run several workers of this queue; with both of them nothing is done twice.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
from celery import beat, bootsteps
from celery.worker import state

from tasks.beat import Scheduler
from tasks.celery_app import celery

log = structlog.get_logger(__name__)


class Here(Scheduler):
    """Celery's own, but that a task which is due is begun in this process instead of being sent there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._threads = ThreadPoolExecutor(len(self.app.conf.beat_schedule), "maintenance")

    producer = None  # type: ignore[assignment]  # Celery's own waits for the broker.

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self._threads.submit(self._run, entry)

    def _run(self, entry: Any) -> None:
        try:
            self.app.tasks[entry.task](*entry.args)
        except Exception:
            log.exception("maintenance_failed", task=entry.task)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        super().close()


class Beat(threading.Thread):
    """Beat in a thread.  Its end, unless it was asked for, ends the worker, which then is started again as a whole."""

    def __init__(self) -> None:
        super().__init__(name="beat", daemon=True)
        self._service = beat.Service(celery, scheduler_cls=Here)
        self._stopping = False

    def run(self) -> None:
        try:
            self._service.start()
        except Exception:
            log.exception("beat_failed")
        finally:
            if not self._stopping:
                state.should_stop = 1  # type: ignore[assignment]  # the exit status

    def stop(self) -> None:
        """Returns when what has begun has ended."""
        self._stopping = True
        self._service.stop(wait=True)


class EmbeddedBeat(bootsteps.StartStopStep):
    """The worker's part that is beat, if `--embedded-beat` asks for it."""

    def __init__(self, worker: Any, embedded_beat: bool = False, **options: Any) -> None:
        super().__init__(worker, **options)
        self.enabled = embedded_beat

    def create(self, worker: Any) -> Any:
        return Beat()
