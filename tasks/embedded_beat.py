"""Beat as a thread of the worker that does what it says: what is due is begun there, and no message is sent.

    celery -A tasks worker -Q maintenance --embedded-beat

Where one process of each kind is enough, that spares one of them, several messages a second, and the broker's help.
`celery -A tasks beat` is for those who run several workers of this queue; with both of them nothing is done twice.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import structlog
from celery import beat, bootsteps
from celery.worker import state

from tasks.beat import Scheduler
from tasks.celery_app import celery

log = structlog.get_logger(__name__)

_LONG_S = 0.05  # for one task: those that are due with it go on beside it
_ENDS_S = 3.0  # of beat that stops; the supervisor gives the whole worker eight
# What is done as soon as beat begins, each after the end of the one before: what was missed meanwhile waits for it.  A
# room that Redis has lost is filled first, with the leases of its runs; the reaper shall meet none that is about to be.
_FIRST = ("sweep", "reap-killed", "reap", "keep-time")


class Threads:
    """For what is begun by names, each once at a time; the process waits for none at its exit, as for an executor's."""

    def __init__(self) -> None:
        self._lasting: dict[str, None] = {}
        self._ended = threading.Condition()

    def begin(self, acts: Mapping[str, Callable[[], object]]) -> None:
        """Do these one after another in a thread, but those whose names still last.

        Where one of them takes long, the next go on in another thread, so that it holds up nobody.  Answers when the
        last has begun.
        """
        with self._ended:
            waiting = deque((name, act) for name, act in acts.items() if name not in self._lasting)
            self._lasting.update(dict.fromkeys(name for name, _ in waiting))
        while waiting:
            begun = threading.Event()
            threading.Thread(target=self._do, args=(waiting, begun), name="maintenance", daemon=True).start()
            begun.wait(_LONG_S)

    def lasting(self) -> list[str]:
        with self._ended:
            return list(self._lasting)

    def wait(self, within_s: float) -> bool:
        """Wait for the end of what was begun; False: that takes longer."""
        with self._ended:
            return self._ended.wait_for(lambda: not self._lasting, max(within_s, 0))

    def _do(self, waiting: "deque[tuple[str, Callable[[], object]]]", all_begun: threading.Event) -> None:
        """One after another, whoever else takes of them, too."""
        while True:
            try:
                name, act = waiting.popleft()
            except IndexError:
                all_begun.set()
                return
            if not waiting:
                all_begun.set()
            try:
                act()
            finally:
                with self._ended:
                    self._lasting.pop(name, None)
                    self._ended.notify_all()


class Here(Scheduler):
    """As Celery's own, but that what is due is begun in this process, and together with what is due at the same time.

    Each entry is due at the whole multiples of its interval, by a clock that nobody sets: so they wake the process
    together, and the record and Redis are looked at by one after the other.
    """

    def __init__(self, threads: Threads, *args: Any, **kwargs: Any) -> None:
        self._threads = threads
        self._began = time.monotonic()
        self._times: dict[str, int] = {}  # that each entry was due since then
        self._first: Sequence[str] = _FIRST
        super().__init__(*args, **kwargs)

    producer = None  # type: ignore[assignment]  # Celery's own waits for the broker.

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Begin what is due; answers for how many seconds nothing will be."""
        now_s = time.monotonic() - self._began
        looked = [(entry, *self._look(entry, now_s)) for entry in list(self.schedule.values())]
        self._begin_first()
        self._begin(sorted((entry for entry, is_due, _ in looked if is_due), key=_rareness))
        longest_s = float(self.max_interval or 0)
        soonest = min((at for _, _, at in looked), default=now_s + longest_s)
        return max(min(soonest - (time.monotonic() - self._began), longest_s), 0.0)

    def _begin_first(self) -> None:
        first = [self.schedule[name] for name in self._first if name in self.schedule]
        self._first = ()

        def run() -> None:
            for entry in first:
                self._run(entry)

        self._threads.begin({"first": run} if first else {})

    def _look(self, entry: Any, now_s: float) -> tuple[bool, float]:
        """Whether an entry is due, and when it will be next."""
        interval = getattr(entry.schedule, "run_every", None)
        if interval is None:  # By the time of day, as Celery's own that cleans up a backend of results.
            is_due, next_s = entry.is_due()
            if is_due:
                self.reserve(entry)
            return bool(is_due), now_s + float(next_s or 0)
        every_s = interval.total_seconds()
        times = int(now_s / every_s)
        is_due = times > self._times.get(entry.name, 0)
        self._times[entry.name] = times
        return is_due, (times + 1) * every_s

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self._begin([entry])

    def _begin(self, entries: Sequence[Any]) -> None:
        self._threads.begin({entry.name: partial(self._run, entry) for entry in entries})

    def _run(self, entry: Any) -> None:
        try:
            self.app.tasks[entry.task](*entry.args)
        except Exception:
            log.exception("maintenance_failed", task=entry.task)


def _rareness(entry: Any) -> float:
    """By which what is done most often comes first: what is done rarely may take long."""
    interval = getattr(getattr(entry, "schedule", None), "run_every", None)
    return float("inf") if interval is None else float(interval.total_seconds())


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
