"""Submit, cancel and revive jobs; publish offers and ends.  How runs start and end: routing/dispatch/run_steps.py.

Each action commits to the database first and calls Redis after it.  If Redis fails in between, the database is right,
and routing.maintenance brings Redis to it; no action waits for that.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import structlog
from redis.exceptions import RedisError, ResponseError

from routing.admission import constraints
from routing.admission.admission import REFUSALS, Admission
from routing.admission.pricing import with_cost
from routing.admission.submission import Submission, UrlCheck, error_index, prepare_job
from routing.admission.submit_limits import LimitStatus, has_eligible_server
from routing.config import RoutingSettings
from routing.dispatch.postponed_jobs import PostponedJobs
from routing.queue.fleets import Fleets
from routing.queue.leases import Lease, Leases
from routing.queue.queues import Offer, Position, Queues, WithdrawResult
from routing.queue.slots import Slots
from routing.queue.watched_jobs import WatchedJobs
from slotkeeper import audit
from slotkeeper.clock import now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.db.time_limits import time_limit
from slotkeeper.errors import Conflict, DatabaseUnavailable, JobNotFound, UnknownModel
from slotkeeper.jobs import queue_epochs
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.store import JobStore, Transition
from slotkeeper.jobs.terms import decode_terms
from slotkeeper.jobs.values import AcceptedJob, Job, JobError, NewJob, Quarantine, QueuedJob, Run
from slotkeeper.registry.catalog_cache import CatalogCache
from slotkeeper.registry.identity import Identity
from slotkeeper.registry.snapshot import CatalogSnapshot

log = structlog.get_logger(__name__)

_POSTPONED_AT_ONCE = 1000  # as many as the sweep reads at once
CANCELED_WAITING = JobError("canceled", "Canceled before it was started.")
_OVERLONG_FACTOR, _MIN_OVERLONG_MS = 3, 10_000


class Notifier(Protocol):
    """Notifies workers and clients.  A failure does no harm: the database knows, and a sweep notifies again."""

    def wake_worker(self, offer: Offer, new: QueuedJob | None) -> None:
        """Wake a worker for an open offer.  If the message is lost, the offer expires and is made again.

        `new`: the job, if it has just been accepted and so never ran; None: the notifier reads what it needs.
        """

    def notify_ended(self, moved: Transition) -> None:
        """Notify those who wait for a job that it has ended."""


class Receipt(NamedTuple):
    """Result of a submit.  `job`: as the queue has it; `notice`: what its client should know.

    `position`: None: it was not asked for, or Redis has not answered.  `rates`: how many submits the sender's rates
    leave.
    """

    accepted: AcceptedJob
    job: QueuedJob
    notice: str | None = None
    position: Position | None = None
    rates: Sequence[LimitStatus] = ()


class BatchCancellation(NamedTuple):
    """What one call did.  canceled: waiting jobs.  asked: running jobs.  is_complete: no unfinished job is left."""

    canceled: int
    asked: int
    is_complete: bool


class ActiveRun(NamedTuple):
    """A started job, and the lease under which it runs."""

    run: Run
    lease: Lease


class Dispatcher:
    """The use cases, on the database and Redis."""

    def __init__(
        self,
        store: JobStore,
        catalog: CatalogCache,
        queues: Queues,
        leases: Leases,
        slots: Slots,
        fleets: Fleets,
        admission: Admission,
        settings: RoutingSettings,
        notifier: Notifier,
        check_url: UrlCheck,
    ) -> None:
        self.store = store
        self.catalog = catalog
        self.queues = queues
        self.leases = leases
        self.slots = slots
        self.fleets = fleets
        self.settings = settings
        self.admission = admission
        self._notifier = notifier
        self.check_url = check_url
        self.watched = WatchedJobs(queues.scripts)
        self._postponed = PostponedJobs()

    # -- submit ----------------------------------------------------------------------------------------------

    def submit(self, submissions: Sequence[Submission], sender: Identity) -> list[Receipt]:
        """Accept jobs, all or none, and return a receipt for each once they are stored.

        sender: who submits them.  The jobs may be those of other tenants, for which the interface lets it act.

        Redis is called after the commit; if it does not answer, the sweep enqueues the jobs later.  The receipt of a
        job that was submitted alone has its position.

        Raises InvalidJob (its fact `index` says which job), UnknownModel, Conflict, TooManyRequests,
        IdempotencyConflict, InsufficientCredits, DatabaseUnavailable, CommitUnknown; one of the last two within
        `DatabaseTimeouts.request_s`.
        """
        with time_limit(self.store.database.limits.request_s):
            return self._submit(submissions, sender)

    def _submit(self, submissions: Sequence[Submission], sender: Identity) -> list[Receipt]:
        catalog = self.catalog.get()  # This also synchronizes the clock.
        if any(catalog.model(submission.request.model) is None for submission in submissions):
            catalog = self.catalog.refresh()  # One may just have been registered.
        now = now_ms()
        new: list[NewJob] = []
        with error_index(new):
            for submission in submissions:
                model = catalog.resolve(submission.request.model)
                environment = catalog.limits_of(submission.tenant).allowed_environments[0]
                job = prepare_job(submission, model, self.check_url, now, environment)
                new.append(with_cost(job, catalog) if job.tenant in catalog.metered else job)
        notices, rates = self._admit(new, sender, catalog, now)
        accepted = self.store.submit(new, now)
        crash_at("submit_committed")
        self._watch(new, now)
        queued = [self._as_queued(*parts, now) for parts in zip(new, accepted, strict=True)]
        entering = [job for job, result in zip(queued, accepted, strict=True) if result.enters_queue]
        positions = self.enqueue(entering, new=True)
        return [
            Receipt(result, job, notice, positions.get(result.id), rates)
            for result, job, notice in zip(accepted, queued, notices, strict=True)
        ]

    def _admit(
        self, new: Sequence[NewJob], sender: Identity, catalog: CatalogSnapshot, now_ms: int
    ) -> tuple[list[str | None], list[LimitStatus]]:
        """Return what the client of each job should know, and what is left of the sender's rates.

        Raises as `submit`, unless all were accepted before.
        """
        try:
            rates = self.admission.check(new, sender, catalog, now_ms)
        except REFUSALS:
            if not self.store.knows_keys(new, now_ms):
                raise
            return [None] * len(new), []
        alike = {(job.model, job.constraints): job for job in new}
        notices = {kind: _make_notice(job, catalog) for kind, job in alike.items()}
        return [notices[job.model, job.constraints] for job in new], rates

    def _watch(self, new: Sequence[NewJob], now_ms: int) -> None:
        """Watch the jobs that are to be canceled when their clients leave."""
        due = {
            job.id: now_ms + round(gone_s * 1000)
            for job in new
            if job.terms is not None and (gone_s := decode_terms(job.terms).cancel_when_gone) is not None
        }
        if due and not self.queues.is_unavailable():
            try:
                self.watched.add(due)
            except RedisError as error:
                log.warning("jobs_not_watched", jobs=len(due), error=str(error))

    def _as_queued(self, job: NewJob, accepted: AcceptedJob, now_ms: int) -> QueuedJob:
        """Return an accepted job as the queue has it."""
        known = self.store.get(accepted.id) if accepted.deduplicated else None
        return queued_job(job, accepted.seq, now_ms) if known is None else known.queued

    def enqueue(self, jobs: Sequence[QueuedJob], *, new: bool = False) -> dict[str, Position]:
        """Put queued jobs into Redis, and publish the offers that this allows.  Failures are left to the sweep.

        After a failure the next call first enqueues what was left, so that newer jobs do not start before it.

        new: they have just been accepted.  Returns the position of a new job that comes alone, by its id.
        """
        snapshot, positions = self.catalog.get(), dict[str, Position]()
        by_fleet: dict[str, list[QueuedJob]] = defaultdict(list)
        for job in jobs:
            model = snapshot.models.get(job.model)
            if model is not None:
                by_fleet[model.fleet].append(job)
        for fleet, entering in by_fleet.items():
            try:
                if self.queues.is_unavailable(fleet) or not self._enqueue_postponed(fleet):
                    self._postponed.add(fleet, entering)
                    continue
                if new and len(jobs) == 1:
                    offers, positions[jobs[0].id] = self.queues.enqueue_new(fleet, jobs[0])
                else:
                    offers = self.queues.enqueue(fleet, entering)
                crash_at("submit_enqueued")
                self.publish_offers(offers, entering if new else ())
                crash_at("offer_published")
            except (RedisError, DatabaseUnavailable) as error:
                self._postpone(fleet, entering, error)
        return positions

    def enqueue_missing(self, fleet: str, jobs: Sequence[QueuedJob]) -> int:
        """Enqueue those of the jobs that are missing in Redis, offer none, and return how many were.

        Their commit may be visible before the disk has it; a power cut must not leave a job in Redis alone.
        """
        self.store.database.sync_for_readers()
        return self.queues.fill(fleet, jobs)

    def _enqueue_postponed(self, fleet: str) -> bool:
        """Enqueue what this process has left to the sweep, and what was accepted after it, in order.

        Returns False if more is left than one call should take; the next goes on.
        """
        postponed = self._postponed.get(fleet)
        if postponed is None:
            return True
        models = self.catalog.get().models_of(fleet)
        batch = self.store.list_queued(models, postponed.first_seq - 1, _POSTPONED_AT_ONCE)
        if batch:
            self.enqueue_missing(fleet, batch)
        is_all = len(batch) < _POSTPONED_AT_ONCE
        self._postponed.advance(fleet, postponed, None if is_all else batch[-1].seq + 1)
        return is_all

    def _postpone(self, fleet: str, jobs: Sequence[QueuedJob], error: RedisError | DatabaseUnavailable) -> None:
        """Leave jobs to the sweep, or to this process's next call: their fleet's queue does not answer."""
        if isinstance(error, RedisError):  # Its timeout is paid once, not at every submit.
            self.queues.mark_unavailable(fleet, error)
        self._postponed.add(fleet, jobs)
        log.warning("enqueue_postponed", fleet=fleet, jobs=len(jobs), error=str(error))

    # -- offers and ends -------------------------------------------------------------------------------------

    def publish_offers(self, offers: Sequence[Offer], new: Sequence[QueuedJob] = ()) -> None:
        """Wake workers for open offers.  new: jobs that have just been accepted; some may be in the offers."""
        by_id = {job.id: job for job in new}
        for offer in offers:
            try:
                self._notifier.wake_worker(offer, by_id.get(offer.job_id))
            except Exception as error:
                log.warning("publish_failed", job_id=offer.job_id, error=str(error))

    def publish_unclaimed(self, offers: Sequence[Offer], claimant: str) -> Offer | None:
        """Return the offer that `claimant` owns, and wake workers for the others."""
        mine = next((offer for offer in offers if claimant and offer.owner == claimant), None)
        self.publish_offers([offer for offer in offers if offer is not mine])
        return mine

    def notify_ended(self, moved: Transition) -> None:
        """Notify those who wait for a job that it has ended, if it has."""
        if moved.to not in FINAL_STATES:
            return
        try:
            self._notifier.notify_ended(moved)
        except Exception as error:
            log.warning("notify_failed", job_id=moved.job.id, error=str(error))

    def longest_usual_ms(self, model: str) -> int:
        """Return after how many ms a run of the model counts as ended where its server cannot be asked.

        Three times what nearly all of its latest runs took, at least 10 s, but no longer than `withhold_max_ms` and the
        `max_poll_time` of the model; if it has had no runs, the smaller of these two.
        Raises DatabaseUnavailable.
        """
        known = self.catalog.get().models.get(model)
        most = self.settings.withhold_max_ms
        if known is not None:
            most = min(most, round(known.config.max_poll_time * 1000))
        usual = self.store.longest_usual_run_ms(model)
        return most if usual is None else min(most, max(_MIN_OVERLONG_MS, _OVERLONG_FACTOR * usual))

    # -- cancel, revive --------------------------------------------------------------------------------------

    def cancel(self, job_id: str, error: JobError = CANCELED_WAITING) -> State:
        """Cancel a job, and return its state: canceled, or running until its server has ended the run.

        error: of a job that waits.  A job that is canceled already stays so: a client that got no answer asks again.
        Raises JobNotFound; Conflict if it has ended otherwise.
        """
        now = now_ms()
        canceling = audit.make_entry("job.cancel", job_id=job_id, now_ms=now)
        quarantine = Quarantine("canceled", now + self.settings.withhold_max_ms)
        moved = self.store.cancel_waiting(job_id, now, error, canceling.write, quarantine)
        if moved is not None:
            crash_at("cancel_committed")
            self.withdraw([moved.job])
            self.notify_ended(moved)
            return moved.to
        if self.store.request_cancel(job_id, now, canceling.write):
            crash_at("cancel_requested")
            job = self.store.get(job_id)
            if job is not None:
                self.withdraw([job.queued])
            return State.RUNNING
        job = self.store.get(job_id)
        if job is None:
            raise JobNotFound(f"There is no job {job_id!r}.", job_id=job_id)
        if job.state not in FINAL_STATES:  # Its run ended between the two statements, and it waits again.
            return self.cancel(job_id, error)
        if job.state is State.CANCELED:
            return job.state
        raise Conflict(f"Job {job_id!r} has ended already: it is {job.state}.", job_id=job_id, status=job.state)

    def cancel_jobs_of_batch(self, batch: str, tenant: str, within_s: float) -> BatchCancellation:
        """Cancel the unfinished jobs of a batch in order of acceptance, so that those next in turn come first.

        After `within_s` the rest is left to the next call.
        """
        until, canceled, asked = time.monotonic() + within_s, 0, 0
        is_complete = False
        while not is_complete:
            now = now_ms()
            quarantine = Quarantine("canceled", now + self.settings.withhold_max_ms)
            page = self.store.cancel_page_of_batch(batch, tenant, now, CANCELED_WAITING, quarantine)
            crash_at("cancel_committed")
            self.withdraw([*(moved.job for moved in page.ended), *page.asked])
            for moved in page.ended:
                self.notify_ended(moved)
            canceled, asked, is_complete = canceled + len(page.ended), asked + len(page.asked), page.is_last
            if time.monotonic() >= until:
                break
        return BatchCancellation(canceled, asked, is_complete)

    def is_of_older_queue(self, lease: Lease) -> bool:
        """Return whether a newer queue of the fleet was filled since this lease was made: it can start nothing."""
        newest = queue_epochs.read_numbers(self.store.database, [lease.fleet]).get(lease.fleet, 0)
        if (epoch := queue_epochs.epoch_of_lease(lease.name)) >= newest:
            return False
        log.warning("offer_of_older_queue", fleet=lease.fleet, job_id=lease.job_id, epoch=epoch, newest=newest)
        self.queues.mark_unavailable(lease.fleet, ResponseError("its queue is older than the newest"))
        return True

    def withdraw(self, jobs: Sequence[QueuedJob]) -> None:
        """Take jobs out of Redis, or mark the leases of those that run as canceled.  Failures are left to the sweep."""
        by_model: dict[str, list[QueuedJob]] = defaultdict(list)
        for job in jobs:
            by_model[job.model].append(job)
        for model, withdrawn in by_model.items():
            try:
                fleet = self.catalog.resolve(model).fleet
                if "freed" in self._withdraw(fleet, withdrawn):
                    self.publish_offers(self.queues.offer_all(fleet))
            except (RedisError, UnknownModel) as error:
                log.warning("withdraw_postponed", model=model, jobs=len(withdrawn), error=str(error))

    def _withdraw(self, fleet: str, jobs: Sequence[QueuedJob]) -> list[WithdrawResult]:
        return self.queues.call_if_available(lambda: self.queues.withdraw(fleet, jobs))

    def revive(self, job_id: str) -> None:
        """Queue a dead job again.  Raises JobNotFound, Conflict, InsufficientCredits."""
        now = now_ms()
        queued = self.store.revive(job_id, now, audit.make_entry("job.retry", job_id=job_id, now_ms=now).write)
        if queued is None:
            job = self.store.get(job_id)
            if job is None:
                raise JobNotFound(f"There is no job {job_id!r}.", job_id=job_id)
            raise Conflict(f"Job {job_id!r} is {job.state}; only a dead job can be retried.", status=job.state)
        self.enqueue([queued])


def queued_job(job: NewJob, seq: int, now_ms: int) -> QueuedJob:
    """Return a job that has just been accepted as the queue has it."""
    return QueuedJob(job.id, seq, job.model, job.priority, job.tenant, now_ms, job.constraints, job.deadline_ms or 0)


def _make_notice(job: NewJob, catalog: CatalogSnapshot) -> str | None:
    """Return what the client of a job should know: no server that is registered can run it."""
    if has_eligible_server(job, catalog):
        return None
    why = constraints.no_server_message(catalog.servers.values(), job.model, job.constraints)
    return f"At present {why}; the job waits until one does."


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
        terms=job.terms,
        last_error=job.error,
    )
    fleet = dispatcher.catalog.resolve(job.model).fleet
    return ActiveRun(run, Lease.from_stored_text(fleet, job.id, job.lease, job.slot))
