"""A worker process: its name on leases, its heartbeat, and the lives of its runs, from their offers to their ends."""

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog
from celery.exceptions import Ignore
from celery.worker.request import Request
from redis.exceptions import RedisError

from database.db import Write
from dispatch.dispatcher import ActiveRun, Dispatcher, new_owner
from dispatch.outcome import Kind, Outcome
from foundation import large_json, logs
from foundation.clock import steady_s
from foundation.crash import crash_at
from foundation.errors import RecordUnavailable, RecordUncertain, SlotkeeperError
from foundation.lifetimes import Lifetimes
from foundation.once import once
from foundation.traces import trace_id_of
from insight.said import Telling
from jobs.record import now_ms
from jobs.states import State
from jobs.store import Moved
from registry.catalog import Snapshot
from registry.config import ModelConfig
from routing.leases import Lease
from routing.queues import Offer
from routing.workers import Workers
from tasks import descriptions, messages, settlement
from tasks.abandoned import Abandoned
from tasks.aside import Aside
from tasks.config import TaskSettings
from tasks.engine import Engine
from tasks.heartbeat import Heartbeat, Watch
from tasks.inquiry import Inquiry
from tasks.poller import Poller
from tasks.pulse import end_if_stopped
from tasks.releases import PatientLeases
from tasks.rights import LeaseExpired, Rights
from tasks.runner import Left, Runner
from tasks.said import Saying, Speech
from tasks.servers import Live
from tasks.settlement import End
from tasks.shown import Reception, Shown, in_celerys_words
from tasks.starts import Starts
from tasks.ways import Ways, has_one_slot, version_at
from tasks.wiring import dispatcher, leases, lifetimes, tallies, telling, workers
from upkeep import draining

T = TypeVar("T")
log = structlog.get_logger(__name__)

_FELT_EVERY_S = 1.0
_START_AGAIN_MS = 1_000
_STORE_AGAIN_S = 1.0
_LAST_TRIES_S = 3.0  # A worker that is told to stop goes on trying for so long: another can resume what is stored.


class OwnRun(NamedTuple):
    """A run of this process: the job it runs, its lease, and the task that Celery shows."""

    active: ActiveRun
    watch: Watch
    shown: Shown

    @property
    def canceling(self) -> bool:
        return self.watch.cancel or self.active.run.cancel_requested


class Worker:
    """What belongs to this process.  There is one, made when the first job comes."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        leases: PatientLeases,
        workers: Workers,
        telling: Telling,
        capacity: int,
        note_gap: Callable[[float], object] = lambda seconds: None,
        lifetimes: Lifetimes | None = None,
    ) -> None:
        """`note_gap`: is told how long a slot that was handed on waited for its next request, in s.

        `lifetimes`: by which its end is known at once if it is killed.
        """
        self.dispatcher = dispatcher
        self._note_gap = note_gap
        self.owner = new_owner("worker")
        self._lifetimes = lifetimes
        if lifetimes is not None:
            lifetimes.try_to_begin(self.owner)  # before its first claim
        self._leases = leases
        self._ways = Ways(dispatcher.catalog)
        self.engine = Engine(dispatcher.store.database, leases)
        self._saying = Saying(telling, self.engine.ask_room, self.engine.loop)
        self._workers = workers
        self._room = Aside("room", self._look_at_workers)
        workers.refresh_by(self._room.ask)  # The loop asks for it, and must not wait.
        self.rights = Rights(leases, dispatcher.settings, self.engine.ask_room)
        self.starts = Starts(dispatcher, self._ways, self.engine)
        self.inquiry = Inquiry(dispatcher.store, leases)
        self._chores = Aside("chores", self.do_chores)
        self.heartbeat = Heartbeat(
            leases,
            self.owner,
            dispatcher.settings.renew_every_ms,
            doubt=lambda watches: self.inquiry.ask(watches, doubted=True),
            then=self._after_beat,
            soon=self.engine.soon,
        )
        self.heartbeat.start()
        self.consumer: Any = None  # Celery's consumer; None while there is none, or while draining
        self.node_name = ""  # Celery's name of this worker, once there has been a consumer
        self._draining = self._grace_over = False  # the first for good; after the second runs are handed back
        self.poller = Poller(dispatcher, workers, self.owner, lambda: self.room, self.run_claimed)
        self.capacity = capacity
        self._taken_up: dict[str, Shown] = {}  # leases whose offers this process has taken up, until their runs end
        self._abandoned = Abandoned(self.engine, dispatcher)
        self._handed_on: dict[str, float] = {}  # leases that came with a slot's release, and since when (monotonic s)
        self._one_large_end = asyncio.Lock()  # Storing a large result takes some 200 MB.
        self._unfilled = 0  # places of ended runs for which nothing was taken, since ends waited for the record
        self._reception: Reception | None = None  # by which Celery's consumer hears of runs that were handed on
        self._lock = threading.Lock()
        self.engine.repeat(_FELT_EVERY_S, lambda: end_if_stopped(self.heartbeat))  # which watches all others

    @property
    def takes(self) -> bool:
        """Whether this worker takes jobs.  A consumer that starts when draining has begun changes nothing."""
        return self.consumer is not None and not self._draining

    @property
    def room(self) -> int:
        """For how many more runs there is room; none while draining."""
        return max(self.capacity - len(self._taken_up), 0) if self.takes else 0

    @property
    def runs(self) -> int:
        """How many are under way."""
        return len(self._taken_up)

    @property
    def claimant(self) -> str:
        """Who takes the next offer at once: this worker, or nobody, if it is full (see `_go_on`) or draining."""
        return self.owner if self.room else ""

    # -- offers come in, from any thread ---------------------------------------------------------------------

    def take(self, request: Request) -> None:
        """Celery has a wake-up for this worker.

        One that comes twice finds its offer taken up, by this process or another, and changes nothing.
        """
        offer = messages.read_offer(str(request.id), request.args, request.request_dict)
        if offer is None:
            log.warning("wake_up_not_understood", job_id=request.id)
            self._show_nothing(Shown(request))
        else:
            self.take_up(offer, Shown(request))

    def take_up(self, offer: Offer, shown: Shown) -> None:
        """Run the job of an open offer, unless this process has taken it up before or is full.

        Another worker that has room, or this one when it has, finds the offer when it looks for work.
        """
        if len(self._taken_up) < self.capacity and self._note(offer.lease, shown):
            self.engine.live(self.begin(offer, shown))
        else:
            self._show_nothing(shown)

    def run_claimed(self, offer: Offer | None, asked_s: float = float("-inf")) -> None:
        """Run a job whose offer this worker holds, without the broker.  `asked_s` (steady_s): when it asked for it."""
        if offer is None:
            return
        if not self.takes:  # Draining has begun since the offer was taken.
            self._reopen(offer)
            return
        shown = Shown()
        with self._lock:
            self._taken_up[offer.lease] = shown  # Its message may be here too, and finds the offer taken up.
        self.engine.live(self.begin(offer, shown, asked_s))

    # -- a run, in the loop ----------------------------------------------------------------------------------

    async def begin(self, offer: Offer, shown: Shown, asked_s: float = float("-inf")) -> None:
        """An offer's life: claimed if it is open, started, run, and settled."""
        logs.about(job_id=offer.job_id)
        claimed: Offer | None = offer
        try:
            if offer.owner != self.owner:
                asked_s = steady_s()
                claimed = await self.engine.ask_room(self._leases.claiming(offer, self.owner))
            run = None if claimed is None else await self._start(claimed, shown, asked_s)
        except Exception as error:  # Whatever it is, neither the job nor its place in this worker is lost.
            mine = self._forget(offer.lease, shown)
            self._show_nothing(shown)
            if mine:
                await self.engine.rarely(self._put_back, offer, error)
            return
        if run is not None:
            await self._run(run)
            return
        self._forget(offer.lease, shown)
        self._show_nothing(shown)
        if claimed is not None:  # The job was gone, so the slot goes to the next.
            asked_s = steady_s()
            await self._go_on(self._lease_of(claimed), await self.engine.rarely(self._free, claimed), asked_s)

    async def _start(self, offer: Offer, shown: Shown, asked_s: float) -> OwnRun | None:
        """Its lease is kept alive while its start is being stored, which may take longer than a lease lasts."""
        crash_at("start_claimed")
        lease, run = self._lease_of(offer), None
        watch = self.heartbeat.add(lease, starting=True, held_s=asked_s)
        if self._grace_over:  # All runs have been told already.
            watch.end("stop")
        try:
            if not await self.rights.holds(watch):
                raise LeaseExpired("Its lease may be another's by now.")
            run = await self.starts.store(offer, watch, self.node_name)
        finally:
            watch.starting = False
            if run is None:
                self.heartbeat.remove(watch)
        crash_at("start_committed")
        return None if run is None else OwnRun(self.dispatcher.begun(offer, run, lease), watch, shown)

    async def _run(self, run: OwnRun) -> None:
        self.engine.later(self._show, run)
        job_id, lease, task_end = run.active.run.job.id, run.active.lease, Ignore()
        trace_id = partial(trace_id_of, job_id, run.active.run.traceparent)
        logs.about(job_id=job_id, tenant=run.active.run.job.tenant, trace_id=trace_id)
        try:
            outcome = await self._outcome(run)
            try:
                task_end = await self._end(run, outcome)
            except RecordUnavailable:
                raise
            except Exception as error:  # It is ours, so it costs the job nothing, and is told with it.
                log.exception("run_not_ended", job_id=job_id)
                task_end = await self._end(run, settlement.not_ended(error))
        except RecordUnavailable as error:  # The lease is gone, or this worker is: another will run it again.
            log.error("result_not_stored", job_id=job_id, error=str(error))
        except Exception:  # The lease expires, and its reaper sees to it.
            log.exception("result_not_stored", job_id=job_id)
        self.heartbeat.remove(run.watch)
        self._forget(lease.name, run.shown)
        self._abandoned.observe(run.active)
        self.engine.later(run.shown.ended, task_end)
        if run.watch.restored:  # Its lease was written again while its end was on the way to the record.
            await self.engine.rarely(lambda: self.dispatcher.free(lease, back=False))
        await self._fill(lease.fleet)

    async def _outcome(self, run: OwnRun) -> Outcome | Left:
        if run.active.run.cancel_requested:
            return Outcome(Kind.CANCELED, message="Canceled before it was sent.")
        speech = self._saying.of(run.active.run.job.id, run.active.run.attempt)
        try:
            if not descriptions.is_known(run.active.run.described_by):
                await self.engine.rarely(descriptions.learn, run.active.run.described_by)
            live = self._speak_to(run, speech)
            swap = live is not None and live.description.asks_for_swap and await self._swaps(run.active.lease)
            runner = self._runner(run, live, swap)
            if (since_s := self._handed_on.pop(run.active.lease.name, None)) is not None:
                self._note_gap(time.monotonic() - since_s)
            outcome = await runner.outcome()
            if live is not None:
                self._abandoned.note(run.active.lease.name, live, runner.question)
            return outcome
        except RecordUnavailable:
            raise  # It says nothing of the server, nor of the job.
        except descriptions.Misconfigured as error:
            return Outcome(Kind.RETRY, code="misconfigured", message=f"The model's configuration is wrong: {error}.")
        except Exception as error:
            log.exception("run_failed", job_id=run.active.run.job.id)
            said = f"The worker failed under it: {type(error).__name__}."
            return Outcome(Kind.LOST, code="internal_error", message=said)
        finally:
            speech.end()

    def _runner(self, run: OwnRun, live: Live | None, swap: bool) -> Runner:
        """Raises UnknownModel."""
        it = run.active.run
        config, version = self._config_of(it.job.model), self._ways.find(version_at, it.server, it.job.model)
        longest_usual_ms = partial(self.engine.rarely, self.dispatcher.longest_usual_ms, it.job.model)
        note_remote, holds = partial(self._note_remote, run), self.rights.holds
        alone = self._ways.find(has_one_slot, it.server)
        return Runner(run.active, run.watch, config, live, note_remote, version, swap, holds, longest_usual_ms, alone)

    def _note_remote(self, run: OwnRun, remote_id: str) -> Awaitable[bool]:
        it = run.active.run
        return self._stored(self.dispatcher.store.noting_remote(it.job.id, it.attempt, remote_id, now_ms()), run.watch)

    async def _swaps(self, lease: Lease) -> bool:
        """Whether the server has to change its model for this run, as far as is known."""
        try:
            return await self.engine.ask_room(self._leases.swaps(lease))
        except RedisError:
            return True

    def _config_of(self, model: str) -> ModelConfig:
        """Return a model's configuration.  A model is not removed while it has runs."""
        found = self._ways.find(Snapshot.model, model)
        return found.config if found is not None else self.dispatcher.catalog.model(model).config

    def _speak_to(self, run: OwnRun, speech: Speech) -> Live | None:
        """Raises Misconfigured.  Its description is known."""
        it = run.active.run
        server = self._ways.find(descriptions.server_of, it.server, it.job.model, it.described_by, it.sent_to)
        return None if server is None else Live(server, self.engine.wires, speech)

    # -- its end ---------------------------------------------------------------------------------------------

    async def _end(self, run: OwnRun, outcome: Outcome | Left) -> Any:
        """Settle what came of a run; answers what its task ends with.  Raises RecordUnavailable."""
        if outcome is Left.STOPPED:
            return await self._hand_back(run)
        if outcome is Left.UNSENT:
            return await self._put_unsent_back(run)
        if isinstance(outcome, Left):
            return await self._ended_elsewhere(run)
        config = self._config_of(run.active.run.job.model)
        is_large = settlement.is_large(outcome)
        judge = partial(settlement.judged, run.active.run, outcome, config, canceling=run.canceling)
        async with self._one_large_end if is_large else nullcontext():
            end = await self.engine.rarely(judge) if is_large else judge()
            moved = await (self._settle_behind(run, end) if end.passes_on else self._settle(run, end))
        return await self._ended_elsewhere(run) if moved is None else in_celerys_words(moved, outcome)

    async def _settle_behind(self, run: OwnRun, end: End) -> Moved | None:
        """The server has let go: the slot goes to the next job, and the end is stored while that is on its way.

        If this process dies in between, the record has a run without a lease: it gets one, which expires, and the job
        is run again on the same server, which knows it by its key.
        """
        active, it, lease = run.active, run.active.run, run.active.lease
        run.watch.passed_on_s = time.monotonic()
        asked_s = steady_s()
        following = await self._release_and_claim(lease, end)
        if following is not None:
            self._handed_on[following.lease] = run.watch.passed_on_s
        await self._go_on(lease, following, asked_s)
        crash_at("slot_passed_on")
        write = self.dispatcher.store.settling(
            it.job.id, it.attempt, end.verdict.why, now_ms(), result=end.result, error=end.error
        )
        moved = await self._stored(write, run.watch)
        crash_at("settle_committed")
        if moved is None:
            await self.engine.rarely(self.dispatcher.let_go, active)
            return None
        self.dispatcher.announce_end(moved, by_worker=True)
        crash_at("settle_announced")
        return moved

    async def _release_and_claim(self, lease: Lease, end: End) -> Offer | None:
        claimant, outcome = self.claimant, end.verdict.outcome
        try:
            (released,) = await self.engine.ask_room(
                self._leases.releasing(lease, back=False, claimant=claimant, outcome=outcome)
            )
        except RedisError as error:
            log.warning("release_postponed", job_id=lease.job_id, error=str(error))
            self._leases.owe(lease)
            return None
        return self.dispatcher.publish_others(released.offers, claimant)

    async def _settle(self, run: OwnRun, end: End) -> Moved | None:
        """First the record, then the slot: the job may come back, or its server may be at it still."""
        store = partial(self._timed, lambda: settlement.store(run.active, end, claimant=self.claimant))
        settled, asked_s = await self._patiently(store, run.watch)
        await self._go_on(run.active.lease, settled.next, asked_s)
        return settled.moved

    async def _hand_back(self, run: OwnRun) -> Ignore:
        """Let another worker resume: the server goes on with the job, the slot stays taken."""
        handed = await self._patiently(lambda: self.dispatcher.hand_back(run.active), run.watch)
        log.info("handed_back", job_id=run.active.run.job.id, stored=handed)
        return Ignore()

    async def _put_unsent_back(self, run: OwnRun) -> Ignore:
        """The lease was lost before the request was sent: another run may have the slot."""
        put_back = partial(self._timed, lambda: self.dispatcher.put_back(run.active, claimant=self.claimant))
        following, asked_s = await self._patiently(put_back, run.watch)
        await self._go_on(run.active.lease, following, asked_s)
        log.warning("put_back_unsent", job_id=run.active.run.job.id)
        return Ignore()

    @staticmethod
    def _timed(act: Callable[[], T]) -> tuple[T, float]:
        """What `act` returns, and when it was called (steady_s)."""
        asked_s = steady_s()
        return act(), asked_s

    async def _ended_elsewhere(self, run: OwnRun) -> Any:
        """This run counts no more: its lease was lost, or the server's push was quicker than the poll.

        Whoever ended it has told everybody.  Only the result of a push is left for this task to say.
        """
        it, lease = run.active.run, run.active.lease
        leave = partial(self.dispatcher.leave, lease, it.job.id, it.attempt, claimant=self.claimant)
        following, asked_s = await self.engine.rarely(self._timed, leave)
        await self._go_on(lease, following, asked_s)
        job = await self.engine.rarely(self.dispatcher.store.get, it.job.id)
        if job is not None and job.state is State.COMPLETED and job.attempt == it.attempt:
            return large_json.stored(job.result) if job.result else None
        return Ignore()

    async def _go_on(self, ended: Lease, offer: Offer | None, asked_s: float) -> None:
        """A run is over: go on with the offer that came of it, or find another if this worker is full.

        A full worker reads no messages, so each fleet with work in turn gets the place that has become free.
        `asked_s`: when Redis was asked for the offer.
        """
        if offer is None and self.takes and not self.room:
            others = len(self._taken_up) - (ended.name in self._taken_up)
            if others < self.capacity:
                asked_s = steady_s()
                offer = await self.engine.rarely(self._offer_in_turn, ended.fleet)
            else:  # Runs whose ends are not stored yet have taken their next already, and they still count.
                self._unfilled += 1
        await self._begin_or_reopen(offer, asked_s)

    async def _fill(self, fleet: str) -> None:
        """A run of this fleet counts no more: take now what was left when its place was not free yet."""
        if self._unfilled and self.room:
            self._unfilled -= 1
            asked_s = steady_s()
            await self._begin_or_reopen(await self.engine.rarely(self._offer_in_turn, fleet), asked_s)

    async def _begin_or_reopen(self, offer: Offer | None, asked_s: float) -> None:
        if offer is not None and not self.takes:
            await self.engine.rarely(self._reopen, offer)
        else:
            self.run_claimed(offer, asked_s)

    def _stored(self, write: Write[T], watch: Watch) -> Awaitable[T]:
        return self._until_stored(partial(self.engine.store, write), watch)

    def _patiently(self, act: Callable[[], T], watch: Watch) -> Awaitable[T]:
        return self._until_stored(partial(self.engine.rarely, act), watch)

    async def _until_stored(self, act: Callable[[], Awaitable[Any]], watch: Watch) -> Any:
        """Try until the record takes it, for as long as the run is this worker's.  Raises RecordUnavailable."""
        ends: float | None = None
        while True:
            try:
                return await act()
            except RecordUnavailable:
                now = self.engine.loop.time()
                if watch.stop:
                    ends = ends or now + _LAST_TRIES_S
                if watch.lost or (ends is not None and now >= ends):
                    raise
                # Not all at the same moment, in which they would make one batch again that may be what is too much.
                await watch.wait(_STORE_AGAIN_S * random.uniform(0.5, 1.5))

    # -- Celery ----------------------------------------------------------------------------------------------

    def _show(self, run: OwnRun) -> None:
        """Tell Celery of a run that has begun; of one that was handed on it hears now for the first time."""
        if self._reception is not None and self.consumer is not None:
            it, lease = run.active.run, run.active.lease
            offer = Offer(lease.fleet, lease.job_id, lease.name, lease.slot, lease.server, it.job.model, 0)
            run.shown.introduce(self._reception, offer, it.failures)
        run.shown.began()

    def _show_nothing(self, shown: Shown) -> None:
        """Nothing came of a wake-up.  May be called by any thread."""
        self.engine.soon(self.engine.later, shown.began)
        self.engine.soon(self.engine.later, shown.ended, Ignore())

    # -- what is rare ----------------------------------------------------------------------------------------

    def _offer_in_turn(self, fleet: str) -> Offer | None:
        try:
            for following in self.poller.turns.after(fleet):
                offers = self.dispatcher.queues.offer(following, 1, claimant=self.owner)
                if offers:
                    return offers[0]
        except RedisError as error:
            log.warning("offer_postponed", error=str(error))
        return None

    def _note(self, lease: str, shown: Shown) -> bool:
        """Remember that this process has taken up an offer.  False: it had done so before."""
        with self._lock:
            return self._taken_up.setdefault(lease, shown) is shown

    def _forget(self, lease: str, shown: Shown) -> bool:
        """False: the offer came to this process another way meanwhile, and that run lives."""
        self._handed_on.pop(lease, None)
        with self._lock:
            mine = self._taken_up.get(lease) is shown
            if mine:
                del self._taken_up[lease]
            return mine

    def _free(self, offer: Offer) -> Offer | None:
        try:
            job = self.dispatcher.store.get(offer.job_id)
            return draining.leave(self.dispatcher, self._lease_of(offer), job, self.claimant)
        except Exception as error:  # The lease expires, and its reaper sees to it.
            log.warning("release_postponed", job_id=offer.job_id, error=str(error))
            return None

    def _reopen(self, offer: Offer) -> None:
        """Let another worker have what this one has been offered and not begun."""
        if offer.number == 0:
            self.dispatcher.offer_again(self._lease_of(offer), offer.model)
        else:
            self.dispatcher.free(self._lease_of(offer), back=True)

    def _put_back(self, offer: Offer, error: Exception) -> None:
        """The job could not be started, through no fault of its own: back to its place, and not at once again."""
        is_foreseen = isinstance(error, SlotkeeperError | RedisError)
        log.warning("start_postponed", job_id=offer.job_id, error=str(error), exc_info=None if is_foreseen else error)
        if offer.number == 0:
            # Made again for a run that its server may be at: nowhere else.  The reaper will make it once more.
            return
        if isinstance(error, RecordUncertain):
            return  # It may be running under this lease; when that expires, the reaper knows what the record says.
        self.dispatcher.free(self._lease_of(offer), back=True, cooldown_ms=_START_AGAIN_MS)

    def _after_beat(self, was_away: bool) -> None:
        """Redis answers: have done what can wait for that, by others than the heartbeat."""
        end_if_stopped(*self.engine.pulses, self._room, self._chores, self.poller)
        if was_away:  # A cancel or a passed deadline of which Redis could not tell us stands in the record.
            self.inquiry.ask(self.heartbeat.watches())
        self._chores.ask()

    def _look_at_workers(self) -> None:
        with suppress(RedisError):  # The poller says so once a second.
            self._workers.look()

    def do_chores(self) -> None:
        self._free_owed()
        self.dispatcher.observer.learn()
        if self._draining:  # The poller has ended, and slots that become free here are for others.
            self._look_at_workers()

    def _free_owed(self) -> None:
        """Redis is back: free what could not be freed.  Whoever has such a lease by now is not disturbed (LEASE-4)."""
        for lease, (back, cooldown_ms) in self._leases.owed().items():
            self.dispatcher.free(lease, back=back, cooldown_ms=cooldown_ms)
            if lease in self._leases.owed():
                return  # It is away again, and each try costs its time-out.

    def _lease_of(self, offer: Offer) -> Lease:
        return Lease(offer.fleet, offer.job_id, offer.lease, self.owner, offer.slot)

    def attend(self, consumer: Any, reception: Reception | None = None) -> None:
        """Take jobs from now on, as tasks of this consumer of Celery's."""
        first, self.consumer, self._reception = self.consumer is None, consumer, reception
        self.node_name = consumer.hostname
        if first:
            self.poller.start()

    def drain(self) -> None:
        """Take nothing more, ever; after the grace time, hand back what another worker can go on with."""
        if self._draining:
            return
        self._draining, self.consumer = True, None
        self.poller.end()
        timer = threading.Timer(TaskSettings().grace_s, self._hand_all_back)
        timer.daemon = True
        timer.start()

    def _hand_all_back(self) -> None:
        self._grace_over = True  # First: a run that begins just now is told by itself, or with the others.
        self.heartbeat.stop_all()

    def end(self) -> None:
        """The pool stops, whoever wants that: all runs have their time to end, or are handed back."""
        self.drain()  # Of a signal Celery has told already, of anything else not.
        self.engine.wait()
        self.close()

    def close(self) -> None:
        """End its threads; what is still under way is left where it is, until the process has ended."""
        self.heartbeat.end()
        self.inquiry.end()
        self.engine.close()
        if self._lifetimes is not None and not self._taken_up:
            self._lifetimes.end(self.owner)


@once
def this_worker() -> Worker:
    """The process's Worker, made on first use."""
    return Worker(
        dispatcher(), leases(), workers(), telling(), TaskSettings().threads, tallies().handed_on, lifetimes()
    )
