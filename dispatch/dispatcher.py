"""The use cases: submit, settle, cancel, revive; a worker starts jobs (tasks/starts.py).

Each writes the record first and Redis after it.  If Redis fails in between, the record is right and
upkeep.reconcile brings Redis to it; nothing here waits for that.
"""

import random
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import structlog
from redis.exceptions import RedisError

from admission import placement
from admission.admission import Admission
from admission.gates.placed import is_matched
from admission.questions import Entering, Position
from admission.submission import Submission, UrlCheck, naming, prepare
from audit import acts
from dispatch import retry
from dispatch.verdict import Verdict
from foundation.crash import crash_at
from foundation.errors import Conflict, InvalidJob, JobNotFound, TooMany, UnknownModel
from jobs import run_times, withheld
from jobs.record import Accepted, NewJob, Run, Waiting, now_ms
from jobs.states import FINAL, State, Why
from jobs.store import Error, Moved, Store
from jobs.withheld import Withholding
from registry.cache import CatalogCache
from registry.tenants import Tenant
from routing.config import RoutingSettings
from routing.leases import Lease, Leases
from routing.observer import Observer
from routing.queues import Offer, Queues
from routing.slots import Slots

log = structlog.get_logger(__name__)

DRAINING = "draining"
"""Owner of the leases of slots that are withheld."""

_TIMES_USUAL, _SHORTEST_USUAL_MS = 3, 10_000
_Committing: TypeAlias = Callable[[Sequence[NewJob], int], Callable[[Sequence[Accepted]], object]]
"""Called when jobs are about to be written; what it answers, when they are committed."""


class Announcer(Protocol):
    """How the outside is told.  Any of it may fail without harm: the record knows, and a sweep says it again."""

    def offered(self, offer: Offer, new: Waiting | None) -> None:
        """Wake a worker for an open offer; if it is lost, the offer expires and is made again.

        `new`: the job, if it has come just now and so never ran; else what a worker is told of it must be looked up.
        """

    def ended(self, moved: Moved, *, by_worker: bool) -> None:
        """A job has ended; `by_worker`: with the run of the worker that calls."""


class Receipt(NamedTuple):
    """Answer to a submit.  `waiting`: the job as the waiting room knows it; `notice`: what its client should know.

    `position`: where it stands in the room; None: that was not asked, or the room has not answered.
    """

    accepted: Accepted
    waiting: Waiting
    notice: str | None = None
    position: Position | None = None


class ActiveRun(NamedTuple):
    """A started job, and the lease under which it runs."""

    run: Run
    lease: Lease


@dataclass(frozen=True, slots=True)
class Settled:
    """What came of a run.  `moved` None: the run was over before, and nothing was stored."""

    moved: Moved | None
    next: Offer | None  # already claimed by this worker


class Dispatcher:
    """Brings the record, the waiting room and the leases together."""

    def __init__(
        self,
        store: Store,
        catalog: CatalogCache,
        queues: Queues,
        leases: Leases,
        slots: Slots,
        admission: Admission,
        observer: Observer,
        settings: RoutingSettings,
        announcer: Announcer,
        check_url: UrlCheck,
    ) -> None:
        self.store = store
        self.catalog = catalog
        self.queues = queues
        self.leases = leases
        self.slots = slots
        self.admission = admission
        self.observer = observer
        self.settings = settings
        self._announcer = announcer
        self._check_url = check_url

    # -- submit ----------------------------------------------------------------------------------------------

    def submit(self, asked: Sequence[Submission], tenant: Tenant | None = None) -> list[Receipt]:
        """Accept jobs, all or none.  Answers once they are committed; that Redis is away delays them, no more.

        Raises InvalidJob (its fact `index` says which of them), UnknownModel, TooMany, IdempotencyConflict,
        RecordUnavailable.
        """
        receipts = self._accept(asked, tenant, lambda *_: lambda _: crash_at("submit_committed"))
        self.enqueue([receipt.waiting for receipt in receipts if receipt.accepted.comes_in], new=True)
        return receipts

    def submit_one(self, asked: Submission, tenant: Tenant | None = None) -> Receipt:
        """The same of one job, whose receipt also says where it stands in the room.

        Redis is asked when the job is committed, and works while the disk is waited for.
        """
        with closing(Entering(self.queues)) as entering:
            (receipt,) = self._accept([asked], tenant, partial(self._entering, entering))
            return receipt._replace(position=self._enter(entering)) if receipt.accepted.comes_in else receipt

    def _accept(self, asked: Sequence[Submission], tenant: Tenant | None, committing: _Committing) -> list[Receipt]:
        self.catalog.snapshot()  # With it the common time is heard.
        now = now_ms()
        new = []
        for index, one in enumerate(asked):
            with naming(index):
                new.append(prepare(one, self.catalog.model(one.model), self._check_url, now))
        notices = self._admit(new, tenant, now)
        accepted = self.store.submit(new, now, committing(new, now))
        return [self._receipt(*parts, now) for parts in zip(new, accepted, notices, strict=True)]

    def _admit(self, new: Sequence[NewJob], tenant: Tenant | None, now_ms: int) -> list[str | None]:
        """What the client of each job should know.  Raises as `submit`, unless all were accepted before."""
        try:
            self.admission.check(new, tenant, now_ms)
        except (Conflict, InvalidJob, TooMany):
            if not self.store.knows(new, now_ms):
                raise
            return [None] * len(new)
        return [self._notice(job) for job in new]

    def _notice(self, job: NewJob) -> str | None:
        if is_matched(job, self.catalog):
            return None
        return f"At present {placement.unmatched(job.model, job.constraints)}; the job waits until one does."

    def _receipt(self, job: NewJob, accepted: Accepted, notice: str | None, now_ms: int) -> Receipt:
        known = self.store.get(accepted.id) if accepted.deduplicated else None
        if known is not None:
            return Receipt(accepted, known.waiting, notice)
        return Receipt(accepted, _waiting(job, accepted, now_ms), notice)

    def enqueue(self, waiting: Sequence[Waiting], *, new: bool = False) -> None:
        """Put queued jobs into the room, and publish what that offers.  Failures are left to the reconciler.

        `new`: they have come just now.
        """
        snapshot = self.catalog.snapshot()
        by_fleet: dict[str, list[Waiting]] = defaultdict(list)
        for job in waiting:
            model = snapshot.models.get(job.model)
            if model is not None and not self.queues.is_away(model.fleet):
                by_fleet[model.fleet].append(job)
        for fleet, jobs in by_fleet.items():
            with self._at_room(fleet, len(jobs)):
                offers = self.queues.enqueue(fleet, jobs)
                crash_at("submit_enqueued")
                self.publish(offers, jobs if new else ())
                crash_at("offer_published")

    def _entering(self, entering: Entering, new: Sequence[NewJob], now_ms: int) -> Callable[[Sequence[Accepted]], None]:
        """Only who has passed the gates, which ask Redis too, takes a connection of its own."""
        return partial(self._ask_in, entering.ready(), new[0], now_ms)

    def _ask_in(self, entering: Entering, new: NewJob, now_ms: int, accepted: Sequence[Accepted]) -> None:
        """Have one new job taken into the room, unless it, or its model, is not for that."""
        crash_at("submit_committed")
        job = _waiting(new, accepted[0], now_ms)
        model = self.catalog.known().models.get(job.model)
        if accepted[0].comes_in and model is not None:
            entering.ask(model.fleet, job)

    def _enter(self, entering: Entering) -> Position | None:
        """Publish what was offered with the new job; where it stands, None: the room is away."""
        if entering.asked is None:
            return None
        fleet, job = entering.asked
        with self._at_room(fleet, 1):
            offers, position = entering.answer()
            crash_at("submit_enqueued")
            self.publish(offers, [job])
            crash_at("offer_published")
            return position
        return None

    @contextmanager
    def _at_room(self, fleet: str, jobs: int) -> Iterator[None]:
        """If a fleet's room does not answer, jobs are left to the reconciler."""
        try:
            yield
        except RedisError as error:
            # A Redis that does not answer costs its time-out once, not at every submit.
            self.queues.note_away(fleet, error)
            log.warning("enqueue_postponed", fleet=fleet, jobs=jobs, error=str(error))

    def publish(self, offers: Sequence[Offer], new: Sequence[Waiting] = ()) -> None:
        """Wake workers for open offers.  `new`: jobs that have come just now, of which some may be offered."""
        known = {job.id: job for job in new}
        for offer in offers:
            try:
                self._announcer.offered(offer, known.get(offer.job_id))
            except Exception as error:
                log.warning("publish_failed", job_id=offer.job_id, error=str(error))

    def announce_end(self, moved: Moved, *, by_worker: bool = False) -> None:
        """Tell the outside that a job has ended, if it has."""
        if moved.to not in FINAL:
            return
        try:
            self._announcer.ended(moved, by_worker=by_worker)
        except Exception as error:
            log.warning("announcement_failed", job_id=moved.job.id, error=str(error))

    # -- start -----------------------------------------------------------------------------------------------

    def begun(self, offer: Offer, run: Run, lease: Lease) -> ActiveRun:
        """The active run of a job that has been started; the observer hears of a first start."""
        if run.attempt == 1:
            self.observer.started(offer.fleet, offer.model, run.job.id, run.started_ms)
        return ActiveRun(run, lease)

    # -- settle ----------------------------------------------------------------------------------------------

    def settle(
        self,
        active: ActiveRun,
        verdict: Verdict,
        *,
        result: str | None = None,
        error: Error | None = None,
        retry_after_s: float | None = None,
        claimant: str = "",
        lingers: str = "",
    ) -> Settled:
        """End a run: the record first, then the slot is freed and the next offer made in one step.

        `claimant`: the worker that takes the next job at once; "": all offers are published.  `lingers`: why the server
        may be at the run still, so that its slot is withheld; "": it has let go.
        Raises RecordUnavailable; the lease is held on then.
        """
        run, now = active.run, now_ms()
        due_ms = None
        if verdict.why is Why.SERVER_ERROR:
            config = self.catalog.model(run.job.model).config
            due_ms = now + retry.delay_ms(run.failures, config, random.random(), retry_after_s)
        withhold = Withholding(lingers, now + self.settings.withhold_max_ms) if lingers else None
        moved = self.store.settle(
            run.job.id, run.attempt, verdict.why, now, result=result, error=error, due_ms=due_ms, withhold=withhold
        )
        crash_at("settle_committed")
        if moved is None and not lingers:
            self.let_go(active)
        if moved is None:
            following = self.leave(active.lease, run.job.id, run.attempt, claimant=claimant)
        elif withhold is not None:
            following = self._withhold(active.lease, run.attempt, verdict, moved.to, claimant)
        else:
            following = self.free(active.lease, verdict, back=moved.to is State.QUEUED, claimant=claimant)
        crash_at("settle_released")
        if moved is not None:  # after the slot is free: a webhook may take its time
            self.announce_end(moved, by_worker=True)
        crash_at("settle_announced")
        return Settled(moved, following)

    def longest_usual_ms(self, model: str) -> int:
        """Return how long a run of the model may go on before it counts as over where nothing tells its end.

        Three times what nearly all of its latest runs took, but no longer than the model's runs may take.
        Raises RecordUnavailable.
        """
        known = self.catalog.snapshot().models.get(model)
        most = self.settings.withhold_max_ms
        if known is not None:
            most = min(most, round(known.config.max_poll_time * 1000))
        usual = run_times.longest_usual_ms(self.store.database, model)
        return most if usual is None else min(most, max(_SHORTEST_USUAL_MS, _TIMES_USUAL * usual))

    def let_go(self, active: ActiveRun) -> None:
        """Free the slot that is withheld from a run which was ended elsewhere: its server has let go after all.

        Raises RecordUnavailable.
        """
        run = active.run
        if withheld.forget(self.store.database, run.job.id, run.attempt):
            self.free(draining_lease(active.lease.fleet, run.job.id, run.attempt, run.slot), back=False)

    def hand_back(self, active: ActiveRun) -> bool:
        """Let another worker resume a run that its server goes on with: the slot stays taken, the offer is open."""
        run, now = active.run, now_ms()
        withhold = Withholding("canceled", now + self.settings.withhold_max_ms, resumes=True)
        moved = self.store.settle(run.job.id, run.attempt, Why.HANDED_BACK, now, withhold=withhold)
        crash_at("hand_back_committed")
        if moved is not None and moved.to is State.QUEUED:
            self.offer_again(active.lease, run.job.model)
            return True
        self.leave(active.lease, run.job.id, run.attempt)
        if moved is not None:
            self.announce_end(moved)
        return moved is not None

    def put_back(self, active: ActiveRun, *, claimant: str = "") -> Offer | None:
        """Put a job back whose request was not sent, since its lease was lost before: it costs the job nothing.

        Answers as `free`.  Raises RecordUnavailable.
        """
        run = active.run
        moved = self.store.settle(run.job.id, run.attempt, Why.HANDED_BACK, now_ms())
        if moved is None:
            return self.leave(active.lease, run.job.id, run.attempt, claimant=claimant)
        following = self.free(active.lease, back=moved.to is State.QUEUED, claimant=claimant)
        if moved.to is State.QUEUED:
            self.enqueue([moved.job])
        self.announce_end(moved)
        return following

    def leave(self, lease: Lease, job_id: str, attempt: int, *, claimant: str = "") -> Offer | None:
        """Give up the lease of a run that has ended elsewhere: its slot is free, unless the record withholds it.

        Answers as `free`.  Raises RecordUnavailable.
        """
        it, state = withheld.of_run(self.store.database, job_id, attempt), self.store.state_of(job_id)
        if it is not None and it.slot == lease.slot:
            return self._withhold(lease, attempt, None, state, claimant)
        return self.free(lease, back=state is State.QUEUED, claimant=claimant)

    def _withhold(
        self, lease: Lease, attempt: int, verdict: Verdict | None, state: State | None, claimant: str
    ) -> Offer | None:
        """Let the slot drain.  Redis away: the lease expires, and who reaps it finds in the record what to do."""
        draining = draining_lease(lease.fleet, lease.job_id, attempt, lease.slot)
        outcome = verdict.outcome if verdict is not None else ""
        try:
            _, offers = self.leases.withhold(
                lease, draining, back=state is State.QUEUED, claimant=claimant, outcome=outcome
            )
        except RedisError as error:
            log.warning("withholding_postponed", job_id=lease.job_id, error=str(error))
            return None
        crash_at("slot_withheld")
        return self.publish_others(offers, claimant)

    def offer_again(self, lease: Lease, model: str) -> None:
        """Open a lease for whoever resumes its job on the same slot."""
        try:
            open_ = self.leases.seize(lease, "", self.settings.offer_ms, only_expired=False)
        except RedisError as error:
            log.warning("offer_postponed", job_id=lease.job_id, error=str(error))
            return
        if open_ is not None:
            self.publish([Offer(open_.fleet, open_.job_id, open_.name, open_.slot, open_.server, model, 0)])

    def free(
        self, lease: Lease, verdict: Verdict | None = None, *, back: bool, claimant: str = "", cooldown_ms: int = 0
    ) -> Offer | None:
        """Free a slot, at once or after a cooldown, and hand it on; answers the offer that `claimant` now owns."""
        cooldown_ms = max(cooldown_ms, self._cooldown_ms(verdict), self._server_cooldown_ms(lease, verdict))
        try:
            outcome = verdict.outcome if verdict is not None else ""
            _, offers = self.leases.release(
                lease, back=back, cooldown_ms=cooldown_ms, claimant=claimant, outcome=outcome
            )
        except RedisError as error:
            log.warning("release_postponed", job_id=lease.job_id, error=str(error))
            return None
        return self.publish_others(offers, claimant)

    def publish_others(self, offers: Sequence[Offer], claimant: str) -> Offer | None:
        """The offer that `claimant` now owns; for the others workers are woken."""
        mine = next((offer for offer in offers if claimant and offer.owner == claimant), None)
        self.publish([offer for offer in offers if offer is not mine])
        return mine

    def _server_cooldown_ms(self, lease: Lease, verdict: Verdict | None) -> int:
        """Begin the cooldown of a server that could not be reached; answers how long it is."""
        if verdict is None or not verdict.blames_server:
            return 0
        try:
            return self.slots.cool_down(lease.fleet, lease.server)
        except RedisError as error:  # The slot itself is freed all the same, or remembered as one to be freed.
            log.warning("cooldown_postponed", server=lease.server, error=str(error))
            return 0

    def _cooldown_ms(self, verdict: Verdict | None) -> int:
        if verdict is None or verdict.why is not Why.SERVER_BUSY:
            return 0
        cooldown_ms = (
            self.settings.busy_cooldown_ms if verdict.retry_after_s is None else round(verdict.retry_after_s * 1000)
        )
        return min(cooldown_ms, self.settings.busy_cooldown_max_ms)

    # -- cancel, revive --------------------------------------------------------------------------------------

    def cancel(self, job_id: str) -> State:
        """Cancel a job: at once while it waits, as soon as its server lets go while it runs.

        Answers the state it is in now.  Raises JobNotFound, Conflict (it has ended).
        """
        now = now_ms()
        canceling = acts.act("job.cancel", job_id=job_id, now_ms=now)
        moved = self.store.end_waiting(
            job_id, Why.CANCEL_REQUESTED, now, Error("canceled", "Canceled before it was started."), canceling.note
        )
        if moved is not None:
            crash_at("cancel_committed")
            self.withdraw(moved.job)
            self.announce_end(moved)
            return moved.to
        if self.store.request_cancel(job_id, now, canceling.note):
            crash_at("cancel_requested")
            job = self.store.get(job_id)
            if job is not None:
                self.withdraw(job.waiting)
            return State.RUNNING
        job = self.store.get(job_id)
        if job is None:
            raise JobNotFound(f"There is no job {job_id!r}.", job_id=job_id)
        if job.state not in FINAL:  # It came back from its server between the two looks.
            return self.cancel(job_id)
        raise Conflict(f"Job {job_id!r} has ended already: it is {job.state}.", job_id=job_id, status=job.state)

    def withdraw(self, job: Waiting) -> None:
        """Take a job out of the room, or tell the worker that runs it."""
        try:
            fleet = self.catalog.model(job.model).fleet
            if self.queues.withdraw(fleet, job) == "freed":
                self.publish(self.queues.offer(fleet))
            self.observer.withdrawn(fleet, job.model, [job.id])
        except RedisError as error:
            log.warning("withdraw_postponed", job_id=job.id, error=str(error))

    def withdraw_all(self, jobs: Sequence[Waiting]) -> None:
        """The same for many, with a few calls."""
        by_model: dict[str, list[Waiting]] = defaultdict(list)
        for job in jobs:
            by_model[job.model].append(job)
        for model, its in by_model.items():
            try:
                fleet = self.catalog.model(model).fleet
                if "freed" in self.queues.withdraw_all(fleet, its):
                    self.publish(self.queues.offer_all(fleet))
                self.observer.withdrawn(fleet, model, [job.id for job in its])
            except (RedisError, UnknownModel) as error:
                log.warning("withdraw_postponed", model=model, jobs=len(its), error=str(error))

    def revive(self, job_id: str) -> None:
        """Queue a dead job again.  Raises JobNotFound, Conflict."""
        now = now_ms()
        waiting = self.store.revive(job_id, now, acts.act("job.retry", job_id=job_id, now_ms=now).note)
        if waiting is None:
            job = self.store.get(job_id)
            if job is None:
                raise JobNotFound(f"There is no job {job_id!r}.", job_id=job_id)
            raise Conflict(f"Job {job_id!r} is {job.state}; only a dead job can be retried.", status=job.state)
        self.enqueue([waiting])


def _waiting(job: NewJob, accepted: Accepted, now_ms: int) -> Waiting:
    return Waiting(job.id, accepted.seq, job.model, job.priority, job.tenant, now_ms, job.constraints)


def draining_lease(fleet: str, job_id: str, attempt: int, slot: str) -> Lease:
    """By which the slot of a run is withheld.  No job can have its name."""
    return Lease(fleet, f"{job_id}~{attempt}", "withheld", DRAINING, slot)


def new_owner(name: str) -> str:
    """A worker process's name for its leases: unlike that of any process before it."""
    return f"{name}/{secrets.token_hex(4)}"
