"""A worker process: its name on leases, its heartbeat, and the hand-off of the next job to its own pool."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from celery import bootsteps
from celery.signals import worker_shutdown, worker_shutting_down
from redis.exceptions import RedisError

from jobs.errors import RecordUncertain, SlotkeeperError
from jobs.once import once
from jobs.record import now_ms
from routing import draining
from routing.dispatcher import Dispatcher, Task, new_owner
from routing.leases import Held
from routing.queues import Offer
from routing.workers import Workers
from tasks import messages
from tasks.aside import Aside
from tasks.celery_app import celery
from tasks.config import TaskSettings
from tasks.heartbeat import Heartbeat, Hold
from tasks.inquiry import Inquiry
from tasks.poller import Poller
from tasks.releases import PatientLeases
from tasks.wiring import dispatcher, leases, workers

log = structlog.get_logger(__name__)

_WATCH_EVERY_S = 1.0
_START_AGAIN_MS = 1_000
_EVENTS_EVERY_S = 0.2
_EVENTS_AT_ONCE = 500


class _Message:
    """A task message that never was at a broker, as far as a worker's strategy looks at one."""

    content_type = content_encoding = None  # its body is not encoded
    delivery_info: dict[str, Any] = {"exchange": "", "routing_key": "handoff", "redelivered": False}

    def __init__(self, message: Any) -> None:
        self.headers = message.headers
        self.properties = message.properties
        self.payload = self.body = message.body


class Worker:
    """What belongs to this process.  There is one, made when the first job comes."""

    def __init__(self, dispatcher: Dispatcher, leases: PatientLeases, workers: Workers, capacity: int) -> None:
        self.dispatcher = dispatcher
        self.owner = new_owner("worker")
        self._leases = leases
        self.inquiry = Inquiry(dispatcher.store, leases)
        self._chores = Aside("chores", self.do_chores)
        self.heartbeat = Heartbeat(
            leases,
            self.owner,
            dispatcher.settings.renew_every_ms,
            doubt=lambda holds: self.inquiry.ask(holds, doubted=True),
            then=self._after_beat,
        )
        self.heartbeat.start()
        self.consumer: Any = None  # Celery's consumer; None while there is none, or while draining
        self.poller = Poller(dispatcher, workers, self.owner, lambda: self.room, self.hand_on)
        self._capacity = capacity
        self._begun: set[str] = set()  # leases whose offers this process has taken up, until their runs end
        self._started: dict[str, Task] = {}  # of these, the jobs that wait for a thread, by lease
        self._lock = threading.Lock()

    @property
    def room(self) -> int:
        """For how many more runs there are threads; none while draining."""
        return 0 if self.consumer is None else max(self._capacity - len(self._begun), 0)

    @property
    def taker(self) -> str:
        """Who takes the next offer at once: this worker, or nobody, if it is full (see `go_on`) or draining."""
        return self.owner if self.room else ""

    @contextmanager
    def holding(self, task: Task) -> Iterator[Hold]:
        """Keep the lease of a run alive as long as it lasts."""
        try:
            with self.heartbeat.holding(task.held) as hold:
                yield hold
        finally:
            self._forget(task.held.lease)

    def start(self, offer: Offer) -> Task | None:
        """Begin an offered job, or find it begun by `hand_on`.  None: there is nothing to run.

        A message that comes twice finds its offer taken up, by this process or another, and changes nothing.
        """
        task = self._started.pop(offer.lease, None)
        if task is not None:
            return task
        if not self._note(offer.lease):
            return None
        try:
            claimed = self.dispatcher.leases.claim(offer, self.owner)
            task = None if claimed is None else self.dispatcher.start(claimed, self.owner)
        except (SlotkeeperError, RedisError) as error:
            self._forget(offer.lease)
            self._put_back(offer, error)
            return None
        if task is None:
            self._forget(offer.lease)
        if claimed is not None and task is None:  # The job was gone, so the slot goes to the next.
            self.go_on(offer.fleet, self._free(claimed))
        return task

    def go_on(self, fleet: str, offer: Offer | None) -> None:
        """A run of this fleet is over: go on with the offer that came of it, or find another if this worker is full.

        A full worker reads no messages, so each fleet with work in turn gets the thread that has become free.
        """
        if offer is None and self.consumer is not None and not self.room:
            offer = self._offer_in_turn(fleet)
        if offer is not None:
            self.hand_on(offer)

    def confirm(self, task: Task, hold: Hold) -> None:
        """Let a run that has waited for a thread know whether it still may begin: nobody has renewed its lease.

        Raises RecordUnavailable.
        """
        if now_ms() - task.run.started_ms < self.dispatcher.settings.renew_every_ms:
            return
        try:
            self.heartbeat.renew(hold)
        except RedisError as error:
            log.warning("renewal_failed", job_id=task.run.job.id, error=str(error))
        self.inquiry.look({hold: True})

    def hand_on(self, offer: Offer | None) -> None:
        """Run a job whose offer this worker holds, as a Celery task of its own, without the broker."""
        while offer is not None:
            consumer = self.consumer
            if consumer is None:  # Draining has begun since the offer was taken.
                self._reopen(offer)
                return
            self._note(offer.lease)
            try:
                task = self.dispatcher.start(offer, self.owner)
            except (SlotkeeperError, RedisError) as error:
                self._forget(offer.lease)
                self._put_back(offer, error)
                return
            if task is not None:
                self._to_pool(consumer, offer, task)
                return
            self._forget(offer.lease)
            offer = self._free(offer)

    def _offer_in_turn(self, fleet: str) -> Offer | None:
        try:
            for following in self.poller.turns.after(fleet):
                offers = self.dispatcher.queues.offer(following, 1, taker=self.owner)
                if offers:
                    return offers[0]
        except RedisError as error:
            log.warning("offer_postponed", error=str(error))
        return None

    def _note(self, lease: str) -> bool:
        """Remember that this process has taken up an offer.  False: it had done so before."""
        with self._lock:
            if lease in self._begun:
                return False
            self._begun.add(lease)
            return True

    def _forget(self, lease: str) -> None:
        with self._lock:
            self._begun.discard(lease)

    def _free(self, offer: Offer) -> Offer | None:
        try:
            job = self.dispatcher.store.get(offer.job_id)
            return draining.leave(self.dispatcher, self._held(offer), job, self.taker)
        except SlotkeeperError as error:  # The lease expires, and its reaper sees to it.
            log.warning("release_postponed", job_id=offer.job_id, error=str(error))
            return None

    def _reopen(self, offer: Offer) -> None:
        """Let another worker have what this one has been offered and not begun."""
        if offer.number == 0:
            self.dispatcher.offer_again(self._held(offer), offer.model)
        else:
            self.dispatcher.free(self._held(offer), back=True)

    def _put_back(self, offer: Offer, error: Exception) -> None:
        """The job could not be started, through no fault of its own: back to its place, and not at once again."""
        log.warning("start_postponed", job_id=offer.job_id, error=str(error))
        if offer.number == 0:
            # Made again for a run that its server may be at: nowhere else.  The reaper will make it once more.
            return
        if isinstance(error, RecordUncertain):
            return  # It may be running under this lease; when that expires, the reaper knows what the record says.
        self.dispatcher.free(self._held(offer), back=True, rest_ms=_START_AGAIN_MS)

    def _after_beat(self, was_away: bool) -> None:
        """Redis answers: have done what can wait for that, by others than the heartbeat."""
        if was_away:  # A cancel or a passed deadline of which Redis could not tell us stands in the record.
            self.inquiry.ask(self.heartbeat.holds())
        self._chores.ask()

    def do_chores(self) -> None:
        self._free_owed()
        self.dispatcher.learn_starts()

    def _free_owed(self) -> None:
        """Redis is back: free what could not be freed.  Whoever has such a lease by now is not disturbed (LEASE-4)."""
        for held, (back, rest_ms) in self._leases.owed().items():
            self.dispatcher.free(held, back=back, rest_ms=rest_ms)
            if held in self._leases.owed():
                return  # It is away again, and each try costs its time-out.

    def _held(self, offer: Offer) -> Held:
        return Held(offer.fleet, offer.job_id, offer.lease, self.owner, offer.slot)

    def _to_pool(self, consumer: Any, offer: Offer, task: Task) -> None:
        self._started[offer.lease] = task
        message = _Message(messages.build_for_run(offer, task.run))
        try:
            # The consumer's own way of taking a message: Flower sees it received, started and ended.
            consumer.strategies[messages.TASK](message, None, _nothing, _nothing, None)
        except RuntimeError as error:  # The pool takes nothing any more.
            log.info("handed_back", job_id=offer.job_id, reason=str(error))
            self._hand_back(offer.lease)

    def _hand_back(self, lease: str) -> None:
        """A job was begun and no thread has come to it: another worker shall run it, at no cost to the job."""
        task = self._started.pop(lease, None)
        self._forget(lease)
        if task is not None:
            self.dispatcher.hand_back(task)

    def attend(self, consumer: Any) -> None:
        """Take jobs from now on, as tasks of this consumer of Celery's."""
        first, self.consumer = self.consumer is None, consumer
        if first:
            self.poller.start()

    def drain(self) -> None:
        """Take nothing more; after the grace time, hand back what another worker can go on with."""
        self.consumer = None
        self.poller.end()
        timer = threading.Timer(TaskSettings().grace_s, self.heartbeat.stop_all)
        timer.daemon = True
        timer.start()

    def end(self) -> None:
        """The pool has stopped: what was still waiting for a thread goes to other workers."""
        for lease in list(self._started):
            self._hand_back(lease)


def _nothing(*_: object, **__: object) -> None:
    """There is no broker to acknowledge to."""


@once
def this_worker() -> Worker:
    """The process's Worker, made on first use."""
    return Worker(dispatcher(), leases(), workers(), TaskSettings().threads)


class _QueueWatch(threading.Thread):
    """Consumes from the queue of every model in the catalog, also of those registered later."""

    def __init__(self, consumer: Any) -> None:
        super().__init__(name="queue-watch", daemon=True)
        self._consumer = consumer
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                self._look()
            except Exception as error:
                log.warning("queue_watch_failed", error=str(error))
            self.ended.wait(_WATCH_EVERY_S)

    def _look(self) -> None:
        # Compared with what is really consumed, so that nothing that went wrong once stays so.
        consumed = {queue.name for queue in self._consumer.task_consumer.queues}
        wanted = {messages.queue_of(model) for model in dispatcher().fleet.snapshot().models}
        for queue in sorted(wanted - consumed):
            # Not from here: the connection belongs to the thread of the loop.
            self._consumer.hub.call_soon(self._consumer.add_task_queue, queue)


class RunsJobs(bootsteps.StartStopStep):
    """Marks a worker that runs jobs: it consumes the models' queues and keeps leases."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._watch: _QueueWatch | None = None
        super().__init__(parent, **kwargs)

    def start(self, parent: Any) -> None:
        if "celery" not in celery.amqp.queues.consume_from:
            return  # A worker for maintenance or webhooks alone.
        this_worker().attend(parent)
        _bundle_events(parent)
        self._watch = _QueueWatch(parent)
        self._watch.start()

    def stop(self, parent: Any) -> None:
        if self._watch is not None:
            self._watch.ended.set()


def _bundle_events(consumer: Any) -> None:
    """Send task events five times a second instead of at each turn of the loop: a quarter of a busy worker's time."""
    if consumer.hub is not None and consumer.event_dispatcher is not None:
        consumer.event_dispatcher.on_send_buffered = None
        consumer.event_dispatcher.buffer_limit = _EVENTS_AT_ONCE
        consumer.hub.call_repeatedly(_EVENTS_EVERY_S, consumer._flush_events)


celery.steps["consumer"].add(RunsJobs)


@worker_shutting_down.connect
def _drain(**_: object) -> None:
    if this_worker.made:
        this_worker().drain()


@worker_shutdown.connect
def _end(**_: object) -> None:
    if this_worker.made:
        this_worker().end()
