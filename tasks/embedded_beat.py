"""Celery's beat as a thread of a worker: `python -m tasks worker -Q maintenance --embedded-beat`.

Celery's own `-B` forks a process: 28 MiB and 0.9 % of a core more at rest, and nobody notices its end.  The end of this
thread ends the worker, and its supervisor starts it again.
"""

import threading
from typing import Any

import structlog
from celery import beat, bootsteps
from celery.worker import state

log = structlog.get_logger(__name__)


class BeatThread(threading.Thread):
    """Runs beat's service until it is told to stop."""

    def __init__(self, service: beat.Service) -> None:
        super().__init__(name="beat", daemon=True)
        self._service = service
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            self._service.start()
        except Exception:
            log.exception("beat_failed")
        finally:
            if not self._stopping.is_set():
                state.should_stop = 1  # type: ignore[assignment]  # the exit status

    def stop(self) -> None:
        self._stopping.set()
        self._service.stop()


class EmbeddedBeatStep(bootsteps.StartStopStep):
    """The worker's part that is beat, if `--embedded-beat` asks for it."""

    def __init__(self, worker: Any, embedded_beat: bool = False, **options: Any) -> None:
        super().__init__(worker, **options)
        self.enabled = embedded_beat

    def create(self, worker: Any) -> Any:
        return BeatThread(beat.Service(worker.app, scheduler_cls=worker.app.conf.beat_scheduler))
