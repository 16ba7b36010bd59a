"""A worker process as Celery knows it: it takes jobs, drains, and ends."""

import threading
from collections.abc import Callable
from typing import Any

from routing.dispatch.dispatcher import Dispatcher, new_lease_owner
from routing.progress import ProgressCommands
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.process import singleton
from slotkeeper.process_locks import ProcessLocks
from tasks.config import TaskSettings
from tasks.said import Saying
from tasks.wiring import dispatcher, lifetimes, tallies, telling, workers
from tasks.worker.abandoned import Abandoned
from tasks.worker.background import Background
from tasks.worker.calls import Calls
from tasks.worker.capacity import Capacity
from tasks.worker.engine import Engine
from tasks.worker.executor import Executor
from tasks.worker.heartbeat import Heartbeat
from tasks.worker.inquiry import Inquiry
from tasks.worker.poller import Poller
from tasks.worker.rights import Rights


class Worker:
    """What belongs to this process.  There is one, made when the first job comes."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: WorkerCapacity,
        telling: ProgressCommands,
        capacity: int,
        note_gap: Callable[[float], object] = lambda seconds: None,
        lifetimes: ProcessLocks | None = None,
    ) -> None:
        """`note_gap`: as in Calls.  `lifetimes`: as in Background."""
        self.owner = new_lease_owner("worker")
        self.consumer: Any = None  # Celery's consumer; None while there is none, or while draining
        self._is_draining = False  # for good
        self.places = Capacity(capacity, self.owner, lambda: self.takes)
        self.background = Background(
            dispatcher, workers, self.owner, lifetimes, lambda: self.inquiry.ask(self.heartbeat.watches())
        )
        self.engine = Engine(dispatcher.store.database, dispatcher.leases)
        self.inquiry = Inquiry(dispatcher, self.background.postpone)
        self.heartbeat = Heartbeat(
            dispatcher.leases,
            self.owner,
            dispatcher.settings.renew_every_ms,
            doubt=lambda watches: self.inquiry.ask(watches, doubted=True),
            then=lambda was_away: self.background.after_beat(was_away),
            soon=self.engine.call_soon,
        )
        rights = Rights(dispatcher.leases, dispatcher.settings, self.engine.redis)
        abandoned = Abandoned(self.engine, dispatcher, self.background.postpone)
        saying = Saying(telling, self.engine.redis, self.engine.loop)
        self.calls = Calls(dispatcher, self.engine, saying, rights, abandoned, note_gap)
        self.poller = Poller(
            dispatcher, workers, self.owner, lambda: self.places.room, lambda *given: self.executor.run_claimed(*given)
        )
        self.executor = Executor(
            dispatcher,
            self.owner,
            self.engine,
            self.heartbeat,
            self.places,
            self.poller,
            self.calls,
            rights,
            abandoned,
            self.background,
        )
        self.heartbeat.start()

    @property
    def takes(self) -> bool:
        """Whether this worker takes jobs.  A consumer that starts when draining has begun changes nothing."""
        return self.consumer is not None and not self._is_draining

    @property
    def runs(self) -> int:
        """How many are under way."""
        return self.places.runs

    @property
    def capacity(self) -> int:
        """How many runs may be under way."""
        return self.places.limit

    @capacity.setter
    def capacity(self, limit: int) -> None:
        self.places.limit = limit

    def attend(self, consumer: Any) -> None:
        """Take jobs from now on, of which this consumer of Celery's receives wake-ups."""
        first, self.consumer = self.consumer is None, consumer
        self.executor.node_name = consumer.hostname
        if first:
            self.poller.start()

    def drain(self) -> None:
        """Take nothing more, ever; after the grace time, hand back what another worker can go on with."""
        if self._is_draining:
            return
        self._is_draining, self.consumer = True, None
        self.background.is_draining = True
        self.poller.end()
        timer = threading.Timer(TaskSettings().grace_s, self.hand_all_back)
        timer.daemon = True
        timer.start()

    def hand_all_back(self) -> None:
        """Let other workers resume all runs."""
        self.executor.is_grace_over = True  # First: a run that begins just now is told by itself, or with the others.
        self.heartbeat.stop_all()

    def end(self) -> None:
        """The pool stops, for whatever reason: all runs have their time to end, or are handed back."""
        self.drain()  # Of a signal Celery has told already, of anything else not.
        self.engine.wait()
        self.close()

    def close(self) -> None:
        """End its threads; what is still under way is left where it is, until the process has ended."""
        self.heartbeat.end()
        self.inquiry.end()
        self.engine.close()
        if not self.places.runs:
            self.background.end()


@singleton
def this_worker() -> Worker:
    """The process's Worker, made on first use."""
    return Worker(dispatcher(), workers(), telling(), TaskSettings().threads, tallies().observe_handoff, lifetimes())
