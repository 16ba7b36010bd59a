"""The use cases: submit, cancel, revive.  How runs start and end: routing/dispatch/run_steps.py.

Each writes the record first and Redis after it.  If Redis fails in between, the record is right and
routing.maintenance.reconcile brings Redis to it; nothing here waits for that.
"""

import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import structlog
from redis.exceptions import RedisError

from routing.admission import constraints
from routing.admission.admission import Admission
from routing.admission.gates.placed import has_eligible_server
from routing.admission.questions import Position, enqueue_new
from routing.admission.submission import Submission, UrlCheck, error_index, prepare_job
from routing.config import RoutingSettings
from routing.queue.leases import Lease, Leases
from routing.queue.queues import Offer, Queues
from routing.queue.slots import Slots
from slotkeeper import audit
from slotkeeper.clock import now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.errors import Conflict, InvalidJob, JobNotFound, TooManyRequests, UnknownModel
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.store import JobStore, Transition
from slotkeeper.jobs.values import AcceptedJob, Job, JobError, NewJob, Quarantine, QueuedJob, Run
from slotkeeper.registry.catalog_cache import CatalogCache
from slotkeeper.registry.tenants import Tenant

log = structlog.get_logger(__name__)

QUARANTINE_OWNER = "draining"
"""Owner of the leases of slots that are withheld."""

_TIMES_USUAL, _SHORTEST_USUAL_MS = 3, 10_000


class Notifier(Protocol):
    """How the outside is told.  Any of it may fail without harm: the record knows, and a sweep says it again."""

    def wake_worker(self, offer: Offer, new: QueuedJob | None) -> None:
        """Wake a worker for an open offer; if it is lost, the offer expires and is made again.

        `new`: the job, if it has come just now and so never ran; else what a worker is told of it must be looked up.
        """

    def notify_ended(self, moved: Transition) -> None:
        """A job has ended."""


class Receipt(NamedTuple):
    """Answer to a submit.  `waiting`: the job as the waiting room knows it; `notice`: what its client should know.

    `position`: where it stands in the room; None: that was not asked, or the room has not answered.
    """

    accepted: AcceptedJob
    job: QueuedJob
    notice: str | None = None
    position: Position | None = None


class ActiveRun(NamedTuple):
    """A started job, and the lease under which it runs."""

    run: Run
    lease: Lease


class Dispatcher:
    """Brings the record, the waiting room and the leases together."""

    def __init__(
        self,
        store: JobStore,
        catalog: CatalogCache,
        queues: Queues,
        leases: Leases,
        slots: Slots,
        admission: Admission,
        settings: RoutingSettings,
        announcer: Notifier,
        check_url: UrlCheck,
    ) -> None:
        self.store = store
        self.catalog = catalog
        self.queues = queues
        self.leases = leases
        self.slots = slots
        self.admission = admission
        self.settings = settings
        self._announcer = announcer
        self._check_url = check_url

    # -- submit ----------------------------------------------------------------------------------------------

    def submit(self, asked: Sequence[Submission], tenant: Tenant | None = None) -> list[Receipt]:
        """Accept jobs, all or none, and return a receipt for each once they are stored.

        Redis is asked after the commit; if it does not answer, the reconciler enqueues the jobs later.  The receipt of
        a job that was submitted alone says its position in the queue.

        Raises InvalidJob (its fact `index` says which job), UnknownModel, TooManyRequests, IdempotencyConflict,
        DatabaseUnavailable, CommitUnknown.
        """
        self.catalog.get()  # This also synchronizes the clock.
        now = now_ms()
        new = []
        for index, one in enumerate(asked):
            with error_index(index):
                new.append(prepare_job(one, self.catalog.resolve(one.model), self._check_url, now))
        notices = self._admit(new, tenant, now)
        accepted = self.store.submit(new, now)
        crash_at("submit_committed")
        receipts = [self._receipt(*parts, now) for parts in zip(new, accepted, notices, strict=True)]
        if len(receipts) == 1 and accepted[0].enters_queue:
            return [receipts[0]._replace(position=self._enqueue_new(receipts[0].job))]
        self.enqueue([receipt.job for receipt in receipts if receipt.accepted.enters_queue], new=True)
        return receipts

    def _admit(self, new: Sequence[NewJob], tenant: Tenant | None, now_ms: int) -> list[str | None]:
        """What the client of each job should know.  Raises as `submit`, unless all were accepted before."""
        try:
            self.admission.check(new, tenant, now_ms)
        except (Conflict, InvalidJob, TooManyRequests):
            if not self.store.knows_keys(new, now_ms):
                raise
            return [None] * len(new)
        return [self._notice(job) for job in new]

    def _notice(self, job: NewJob) -> str | None:
        if has_eligible_server(job, self.catalog):
            return None
        return f"At present {constraints.no_server_message(job.model, job.constraints)}; the job waits until one does."

    def _receipt(self, job: NewJob, accepted: AcceptedJob, notice: str | None, now_ms: int) -> Receipt:
        known = self.store.get(accepted.id) if accepted.deduplicated else None
        if known is not None:
            return Receipt(accepted, known.queued, notice)
        return Receipt(accepted, _waiting(job, accepted, now_ms), notice)

    def enqueue(self, waiting: Sequence[QueuedJob], *, new: bool = False) -> None:
        """Put queued jobs into the room, and publish what that offers.  Failures are left to the reconciler.

        `new`: they have come just now.
        """
        snapshot = self.catalog.get()
        by_fleet: dict[str, list[QueuedJob]] = defaultdict(list)
        for job in waiting:
            model = snapshot.models.get(job.model)
            if model is not None and not self.queues.is_unavailable(model.fleet):
                by_fleet[model.fleet].append(job)
        for fleet, jobs in by_fleet.items():
            with self._postpone_if_unavailable(fleet, len(jobs)):
                offers = self.queues.enqueue(fleet, jobs)
                crash_at("submit_enqueued")
                self.publish_offers(offers, jobs if new else ())
                crash_at("offer_published")

    def _enqueue_new(self, job: QueuedJob) -> Position | None:
        """Enqueue one new job, publish the offers, and return its position; None: Redis did not answer."""
        model = self.catalog.cached().models.get(job.model)
        if model is None or self.queues.is_unavailable(model.fleet):
            return None
        with self._postpone_if_unavailable(model.fleet, 1):
            offers, position = enqueue_new(self.queues, model.fleet, job)
            crash_at("submit_enqueued")
            self.publish_offers(offers, [job])
            crash_at("offer_published")
            return position
        return None

    @contextmanager
    def _postpone_if_unavailable(self, fleet: str, jobs: int) -> Iterator[None]:
        """If a fleet's room does not answer, jobs are left to the reconciler."""
        try:
            yield
        except RedisError as error:
            # A Redis that does not answer costs its time-out once, not at every submit.
            self.queues.mark_unavailable(fleet, error)
            log.warning("enqueue_postponed", fleet=fleet, jobs=jobs, error=str(error))

    def publish_offers(self, offers: Sequence[Offer], new: Sequence[QueuedJob] = ()) -> None:
        """Wake workers for open offers.  `new`: jobs that have come just now, of which some may be offered."""
        known = {job.id: job for job in new}
        for offer in offers:
            try:
                self._announcer.wake_worker(offer, known.get(offer.job_id))
            except Exception as error:
                log.warning("publish_failed", job_id=offer.job_id, error=str(error))

    def notify_ended(self, moved: Transition) -> None:
        """Tell the outside that a job has ended, if it has."""
        if moved.to not in FINAL_STATES:
            return
        try:
            self._announcer.notify_ended(moved)
        except Exception as error:
            log.warning("wake_up_failed", job_id=moved.job.id, error=str(error))

    def publish_unclaimed(self, offers: Sequence[Offer], claimant: str) -> Offer | None:
        """The offer that `claimant` now owns; for the others workers are woken."""
        mine = next((offer for offer in offers if claimant and offer.owner == claimant), None)
        self.publish_offers([offer for offer in offers if offer is not mine])
        return mine

    def longest_usual_ms(self, model: str) -> int:
        """Return how long a run of the model may go on before it counts as over where nothing tells its end.

        Three times what nearly all of its latest runs took, but no longer than the model's runs may take.
        Raises DatabaseUnavailable.
        """
        known = self.catalog.get().models.get(model)
        most = self.settings.withhold_max_ms
        if known is not None:
            most = min(most, round(known.config.max_poll_time * 1000))
        usual = self.store.longest_usual_run_ms(model)
        return most if usual is None else min(most, max(_SHORTEST_USUAL_MS, _TIMES_USUAL * usual))

    # -- cancel, revive --------------------------------------------------------------------------------------

    def cancel(self, job_id: str) -> State:
        """Cancel a job: at once while it waits, as soon as its server lets go while it runs.

        Answers the state it is in now.  Raises JobNotFound, Conflict (it has ended).
        """
        now = now_ms()
        canceling = audit.make_entry("job.cancel", job_id=job_id, now_ms=now)
        error = JobError("canceled", "Canceled before it was started.")
        quarantine = Quarantine("canceled", now + self.settings.withhold_max_ms)
        moved = self.store.cancel_waiting(job_id, now, error, canceling.write, quarantine)
        if moved is not None:
            crash_at("cancel_committed")
            self.withdraw(moved.job)
            self.notify_ended(moved)
            return moved.to
        if self.store.request_cancel(job_id, now, canceling.write):
            crash_at("cancel_requested")
            job = self.store.get(job_id)
            if job is not None:
                self.withdraw(job.queued)
            return State.RUNNING
        job = self.store.get(job_id)
        if job is None:
            raise JobNotFound(f"There is no job {job_id!r}.", job_id=job_id)
        if job.state not in FINAL_STATES:  # It came back from its server between the two looks.
            return self.cancel(job_id)
        raise Conflict(f"Job {job_id!r} has ended already: it is {job.state}.", job_id=job_id, status=job.state)

    def withdraw(self, job: QueuedJob) -> None:
        """Take a job out of the room, or tell the worker that runs it."""
        try:
            fleet = self.catalog.resolve(job.model).fleet
            if self.queues.withdraw(fleet, job) == "freed":
                self.publish_offers(self.queues.offer(fleet))
        except RedisError as error:
            log.warning("withdraw_postponed", job_id=job.id, error=str(error))

    def withdraw_all(self, jobs: Sequence[QueuedJob]) -> None:
        """The same for many, with a few calls."""
        by_model: dict[str, list[QueuedJob]] = defaultdict(list)
        for job in jobs:
            by_model[job.model].append(job)
        for model, its in by_model.items():
            try:
                fleet = self.catalog.resolve(model).fleet
                if "freed" in self.queues.withdraw_all(fleet, its):
                    self.publish_offers(self.queues.offer_all(fleet))
            except (RedisError, UnknownModel) as error:
                log.warning("withdraw_postponed", model=model, jobs=len(its), error=str(error))

    def revive(self, job_id: str) -> None:
        """Queue a dead job again.  Raises JobNotFound, Conflict."""
        now = now_ms()
        waiting = self.store.revive(job_id, now, audit.make_entry("job.retry", job_id=job_id, now_ms=now).write)
        if waiting is None:
            job = self.store.get(job_id)
            if job is None:
                raise JobNotFound(f"There is no job {job_id!r}.", job_id=job_id)
            raise Conflict(f"Job {job_id!r} is {job.state}; only a dead job can be retried.", status=job.state)
        self.enqueue([waiting])


def _waiting(job: NewJob, accepted: AcceptedJob, now_ms: int) -> QueuedJob:
    return QueuedJob(job.id, accepted.seq, job.model, job.priority, job.tenant, now_ms, job.constraints)


def active_run_of(dispatcher: Dispatcher, job: Job) -> ActiveRun | None:
    """Return the run that `job` shows, as its worker knows it; None: the job does not run."""
    if job.state is not State.RUNNING or not job.lease or not job.slot or not job.server:
        return None
    run = Run(
        job=job.queued,
        payload=job.payload or "{}",
        attempt=job.attempt,
        failures=job.failures,
        crashes=job.crashes,
        deadline_ms=job.deadline_ms,
        remote_id=job.remote_id,
        sent_ms=None,
        server=job.server,
        slot=job.slot,
        started_ms=job.started_ms or job.created_ms,
        cancel_requested=job.cancel_requested_ms is not None,
        envelope=job.envelope,
        described_by=job.described_by,
        sent_to=job.sent_to,
        traceparent=job.traceparent,
        last_error=job.error,
    )
    return ActiveRun(
        run, Lease.from_stored_text(dispatcher.catalog.resolve(job.model).fleet, job.id, job.lease, job.slot)
    )


def quarantine_lease(fleet: str, job_id: str, attempt: int, slot: str) -> Lease:
    """By which the slot of a run is withheld.  No job can have its name."""
    return Lease(fleet, f"{job_id}~{attempt}", "withheld", QUARANTINE_OWNER, slot)


def new_lease_owner(name: str) -> str:
    """A worker process's name for its leases: unlike that of any process before it."""
    return f"{name}/{secrets.token_hex(4)}"
