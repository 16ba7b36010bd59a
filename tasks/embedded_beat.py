"""Beat as a thread of the worker that does what it says: what is due is begun there, and no message is sent.

    celery -A tasks worker -Q maintenance --embedded-beat

Where one process of each kind is enough, that spares one of them, several messages a second, and the broker's help.
`celery -A tasks beat` is for those who run several workers of this queue; with both of them nothing is done twice.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
from celery import beat, bootsteps
from celery.worker import state

from tasks.beat import Scheduler
from tasks.celery_app import celery

log = structlog.get_logger(__name__)

_ENDS_S = 3.0  # of beat that stops; the supervisor gives the whole worker eight


class Threads:
    """One for each name, and none that the process would wait for at its exit, as it would for an executor's."""

    def __init__(self) -> None:
        self._begun: dict[str, threading.Thread] = {}

    def begin(self, name: str, act: Callable[[], object]) -> None:
        """Do this in a thread of its own, unless what was begun by this name still lasts."""
        if name in self.lasting():
            return
        self._begun[name] = threading.Thread(target=act, name=name, daemon=True)
        self._begun[name].start()

    def lasting(self) -> list[str]:
        return [name for name, thread in list(self._begun.items()) if thread.is_alive()]

    def wait(self, within_s: float) -> bool:
        """Wait for the end of what was begun; False: that takes longer."""
        until = time.monotonic() + within_s
        for thread in list(self._begun.values()):
            thread.join(max(until - time.monotonic(), 0))
        return not self.lasting()


class Here(Scheduler):
    """Celery's own, but that a task which is due is begun in this process instead of being sent there."""

    def __init__(self, threads: Threads, *args: Any, **kwargs: Any) -> None:
        self._threads = threads
        super().__init__(*args, **kwargs)

    producer = None  # type: ignore[assignment]  # Celery's own waits for the broker.

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self._threads.begin(entry.name, partial(self._run, entry))

    def _run(self, entry: Any) -> None:
        try:
            self.app.tasks[entry.task](*entry.args)
        except Exception:
            log.exception("maintenance_failed", task=entry.task)


class Beat(threading.Thread):
    """Beat in a thread.  Its end, unless it was asked for, ends the worker, which then is started again as a whole."""

    def __init__(self) -> None:
        super().__init__(name="beat", daemon=True)
        self._threads = Threads()
        scheduler: Any = partial(Here, self._threads)  # It is only called.
        self._service = beat.Service(celery, scheduler_cls=scheduler)
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
        """Returns when beat and what it has begun have ended, or after 3 s: what then still lasts is cut off.

        That is harmless to maintenance.  Beat that has failed may never have come to where its service says that it
        has ended, so it is the thread that is waited for.
        """
        until = time.monotonic() + _ENDS_S
        self._stopping = True
        self._service.stop()
        if self.is_alive():
            self.join(_ENDS_S)
        if not self._threads.wait(until - time.monotonic()):
            log.warning("maintenance_cut_off", entries=self._threads.lasting())


class EmbeddedBeat(bootsteps.StartStopStep):
    """The worker's part that is beat, if `--embedded-beat` asks for it."""

    def __init__(self, worker: Any, embedded_beat: bool = False, **options: Any) -> None:
        super().__init__(worker, **options)
        self.enabled = embedded_beat

    def create(self, worker: Any) -> Any:
        return Beat()
