"""A dispatcher for tests: a real database and a real Redis, with clocks that the test sets.

A recorder takes the place of Celery.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from redis import Redis

from app.up.ports import free_port
from routing.admission.admission import Admission
from routing.admission.submission import Submission
from routing.config import RoutingSettings
from routing.dispatch.dispatcher import ActiveRun, Dispatcher
from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.dispatch.run_steps import OnPostponed
from routing.maintenance import rebuild
from routing.maintenance.server_report import ServerReport
from routing.queries.explain import explain_job
from routing.queue.fleets import Fleets
from routing.queue.leases import Leases, Renewal
from routing.queue.queues import Offer, Queues
from routing.queue.slots import Slots
from routing.queue.worker_capacity import WorkerCapacity
from routing.scripts import make_scripts
from slotkeeper.db import Database
from slotkeeper.jobs.states import State
from slotkeeper.jobs.store import JobStore, Transition
from slotkeeper.jobs.values import Job, QueuedJob
from slotkeeper.redis.connections import connect
from slotkeeper.redis.keys import Keys
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.catalog_cache import CatalogCache
from slotkeeper.registry.identity import LOCAL_IDENTITY, Identity, Scope, Tenant
from slotkeeper.registry.tenant_limits import NO_RATE, RateLimit
from slotkeeper.registry.tenants import Tenants
from slotkeeper.registry.usage import SlotTimes
from tests.support.builders import T0, a_submission
from tests.support.clock import set_clock
from tests.support.ends import Settled, decided, end_in_order
from tests.support.fleet_queue import FRAGMENTS, FleetQueue
from tests.support.held_leases import hold
from tools.cluster.direct_starts import begin_run, store_remote_id

SETTINGS = RoutingSettings.model_construct(**{n: f.default for n, f in RoutingSettings.model_fields.items()})
LEASE_MS, OFFER_MS = SETTINGS.lease_ms, SETTINGS.offer_ms
SECOND, YEAR = 1000, 365 * 86_400_000
UP_AND_IDLE = ServerReport(up=True, active_jobs=0, job_ids=frozenset())
DOWN = ServerReport(up=False)
FLEETS, TENANTS = ("zimg", "flux"), ("acme",)


@dataclass
class Recorder:
    """Keeps the messages that Celery would have got."""

    offers: list[Offer] = field(default_factory=list)
    ends: list[tuple[str, State]] = field(default_factory=list)
    slots_taken_at_end: list[int] = field(default_factory=list)
    count_taken: Callable[[], int] = lambda: -1
    broken: bool = False

    def wake_worker(self, offer: Offer, new: QueuedJob | None) -> None:
        if self.broken:
            raise ConnectionError("the broker is away")
        self.offers.append(offer)

    def notify_ended(self, moved: Transition) -> None:
        if self.broken:
            raise ConnectionError("the broker is away")
        self.ends.append((moved.job.id, moved.to))
        self.slots_taken_at_end.append(self.count_taken())


class Harness:
    """A dispatcher with its database, catalog and Redis."""

    def __init__(self, database: Database, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
        self.database, self.redis = database, redis
        self.store, self.catalog = JobStore(database), Catalog(database)
        self.notifications = Recorder()
        self.queue = FleetQueue(redis)
        self.dispatcher = self.a_dispatcher(redis)
        self.notifications.count_taken = lambda: self.dispatcher.fleets.counts(["zimg"])["zimg"].taken
        self.postponed: OnPostponed | None = None
        self._names = iter(f"j{n}" for n in range(10_000))
        self.set_clock(T0)
        set_clock(monkeypatch, lambda: self.now)

    def a_dispatcher(self, redis: Redis) -> Dispatcher:
        """Make the dispatcher of a further process: with a separate cache of the catalog and the same database."""
        scripts = make_scripts(redis, Keys("test"), FRAGMENTS)
        cache, queues = CatalogCache(self.catalog, refresh_s=0), Queues(scripts, SETTINGS)
        return Dispatcher(
            store=self.store,
            catalog=cache,
            queues=queues,
            leases=Leases(scripts, SETTINGS),
            slots=Slots(scripts, SETTINGS),
            fleets=Fleets(scripts, SETTINGS),
            admission=Admission(queues, SETTINGS, SlotTimes(self.database, refresh_s=0)),
            settings=SETTINGS,
            notifier=self.notifications,
            check_url=lambda url: None if url.startswith("https://") else "callback_url must be https",
        )

    def cut_off(self) -> Dispatcher:
        """Make the dispatcher of a process that does not reach Redis."""
        return self.a_dispatcher(connect(f"redis://127.0.0.1:{free_port()}/0", 0.2))

    def explained(self, job_id: str) -> str:
        """Return the explanation of a job's state."""
        return explain_job(self.dispatcher, self.living_worker(), self.job(job_id)).sentence

    def living_worker(self) -> WorkerCapacity:
        """Return the capacity of workers, after one has reported."""
        workers = WorkerCapacity(self.dispatcher.slots.scripts)
        workers.report("w1", 64)
        return workers

    # -- time and losses ---------------------------------------------------------------------------------------

    def set_clock(self, now_ms: int) -> None:
        self.now = now_ms
        for tag in (*FLEETS, "test:workers", "test:processes", *(f"test:rate:{tenant}" for tenant in TENANTS)):
            self.redis.set(f"clock:{{{tag}}}", now_ms)

    def later(self, ms: int) -> None:
        self.set_clock(self.now + ms)

    def lose_redis(self) -> None:
        self.redis.flushall()
        self.set_clock(self.now)

    # -- changes -----------------------------------------------------------------------------------------------

    def register(self, slots: int = 1, *, server: str = "gpu", model: str = "zimg", **config: Any) -> None:
        self.catalog.register(model, server, f"http://{server}:1/run", slots, self.now)
        if config:
            self.catalog.configure(model, config, self.now)
        rebuild.refresh_fleet(self.dispatcher, self.catalog.read().models[model].fleet)

    def set_state(self, state: str, server: str = "gpu") -> None:
        self.catalog.set_server_state(server, state, now_ms=self.now)
        rebuild.refresh_fleet(self.dispatcher, self.catalog.read().servers[server].fleet)

    def submit(self, model: str = "zimg", **changes: Any) -> str:
        (job_id,) = self.submit_all([self.a(model, **changes)])
        return job_id

    def submit_all(self, asked: list[Submission], sender: Identity = LOCAL_IDENTITY) -> list[str]:
        return [receipt.accepted.id for receipt in self.dispatcher.submit(asked, sender)]

    def limited(self, tenant: str, key_rate: RateLimit = NO_RATE, **limits: Any) -> Identity:
        """A sender whose tenant has these limits."""
        tenants = Tenants(self.store.database)
        if all(known.name != tenant for known in tenants.list_all()):
            tenants.add(Tenant(tenant), self.now)
        tenants.change(tenant, limits, self.now)
        self.dispatcher.catalog.refresh()
        return Identity(Tenant(tenant), "a-key", frozenset(Scope), key_rate)

    def a(self, model: str = "zimg", **changes: Any) -> Submission:
        return a_submission(**({"model": model, "payload": {"prompt": "a cat"}, "id": next(self._names)} | changes))

    def start(self, owner: str = "w1") -> ActiveRun:
        """Start the job of the oldest wake-up."""
        task = begin_run(self.dispatcher, self.notifications.offers.pop(0), owner)
        assert task is not None
        return task

    def hold(self, task: ActiveRun, ms: int) -> None:
        """Let time pass while a run continues."""
        hold(self.dispatcher, task.lease, self.later, ms)

    def settle(
        self, task: ActiveRun, kind: OutcomeKind = OutcomeKind.DONE, claimant: str = "", **outcome: Any
    ) -> Settled:
        """End a run as its worker does."""
        if kind is OutcomeKind.DONE:
            outcome = {"result": {"url": "x"}} | outcome
        else:
            outcome = {"code": "said", "message": "so"} | outcome
        decision = decided(self.dispatcher, task, Outcome(kind, **outcome))
        return end_in_order(self.dispatcher, task, decision, claimant, self.postponed)

    def remote(self, task: ActiveRun, remote_id: str = "r-1") -> None:
        assert store_remote_id(self.store, task.run.job.id, task.run.attempt, remote_id, self.now)

    # -- state -------------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> Job:
        found = self.store.get(job_id)
        assert found is not None
        return found

    def state(self, job_id: str) -> State:
        return self.job(job_id).state

    def offered(self) -> list[str]:
        """Return the jobs of the published wake-ups, and forget these."""
        found, self.notifications.offers[:] = [offer.job_id for offer in self.notifications.offers], []
        return found

    def renewal(self, task: ActiveRun) -> Renewal:
        return self.dispatcher.leases.renew(task.lease.fleet, task.lease.owner, [task.lease])[0]

    def free(self) -> int:
        return self.dispatcher.fleets.counts(["zimg"])["zimg"].free

    def run_all(self) -> list[str]:
        """Let one worker run all jobs, one after another, and return them in the order of their starts."""
        started = []
        while self.notifications.offers or self._find():
            task = self.start()
            started.append(task.run.job.id)
            self.settle(task)
        return started

    def _find(self) -> bool:
        """Offer jobs for which there was no wake-up, as the worker's polling does."""
        found = [offer for fleet in FLEETS for offer in self.dispatcher.queues.offer(fleet, 1, claimant="w1")]
        self.notifications.offers += found
        return bool(found)
