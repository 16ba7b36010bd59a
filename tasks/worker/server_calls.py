"""The server calls of a worker's runs, and the requests that were given up before their response came."""

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from routing.dispatch import earlier_requests
from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.earlier_requests import EarlierRequest
from routing.dispatch.outcome import Outcome, OutcomeKind, StopReason
from routing.dispatch.run_steps import RunSteps, commit_by_clock
from slotkeeper.clock import now_ms
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs.values import Run
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.run_config import apply_terms
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.values import format_attribute
from tasks import server_adapters
from tasks.server_adapters import Misconfigured
from tasks.servers import RunDetails, ServerSession
from tasks.worker.node_results import NodeResults
from tasks.worker.progress_publisher import ProgressPublisher, ProgressStream
from tasks.worker.run_requests import RunRequests
from tasks.worker.server_call import CANCELED_UNSENT, ServerCall
from tasks.worker.worker_run import WorkerParts, WorkerRun

log = structlog.get_logger(__name__)

_SERVER_REMOVED = Outcome(OutcomeKind.UNREACHABLE, code="server_removed", message="The server was removed.")


class AbandonedCalls:
    """Observes requests whose runs have ended here before the response came.  For the event loop alone."""

    def __init__(self, parts: WorkerParts) -> None:
        self._worker_loop = parts.worker_loop
        self._steps = RunSteps(parts.dispatcher, parts.worker_loop, parts.background_tasks.retry_release)
        self._noted: dict[str, tuple[ServerSession, RunDetails]] = {}  # by lease, until their ends are stored

    def note(self, lease: str, session: ServerSession, requests: RunRequests) -> None:
        """Remember the request of a run that is about to end here, if its response is still to come."""
        if session.abandoned is not None:
            self._noted[lease] = session, requests.poll_details

    def observe(self, active: ActiveRun) -> None:
        """Free the slot of a run whose end is stored as soon as its response has come."""
        noted = self._noted.pop(active.lease.name, None)
        if noted is not None:
            self._worker_loop.spawn_background(self._observe(active, *noted))

    async def _observe(self, active: ActiveRun, session: ServerSession, details: RunDetails) -> None:
        if await session.is_run_over(details):
            log.info("run_over_at_server", job_id=active.run.job.id, slot=active.run.slot)
            await self._steps.release_quarantine(active)


class DatabaseRunStore:
    """What the call of a run stores and reads: the RunStore (server_call.py) of this worker."""

    def __init__(self, worker_run: WorkerRun, parts: WorkerParts) -> None:
        self._run, self._io, self._watch, self._parts = worker_run.run, worker_run.io, worker_run.watch, parts
        self._store = parts.dispatcher.store

    def store_remote_id(self, remote_id: str | None) -> Awaitable[bool]:
        run, store = self._run, self._store
        return commit_by_clock(self._io, lambda: store.remote_id_write(run.job.id, run.attempt, remote_id, now_ms()))

    def store_sent_time(self) -> Awaitable[bool]:
        run, store = self._run, self._store
        return commit_by_clock(self._io, lambda: store.sent_write(run.job.id, run.attempt, now_ms()))

    def find_earlier_request(self) -> Awaitable[EarlierRequest | None]:
        return self._parts.worker_loop.run_in_thread(self._find_earlier_request)

    def longest_usual_ms(self) -> Awaitable[int]:
        return self._parts.worker_loop.run_in_thread(self._parts.dispatcher.longest_usual_ms, self._run.job.model)

    def is_lease_held(self, *, fresh: bool) -> Awaitable[bool]:
        return self._parts.lease_check.is_still_held(self._watch, fresh=fresh)

    def _find_earlier_request(self) -> EarlierRequest | None:
        with suppress(DatabaseUnavailable):  # Then its end is not known.
            return earlier_requests.find(self._store.database, self._run.server, self._run.job.id)
        return None


class ServerCalls:
    """The server calls of one worker's runs.

    record_handover_gap: is given how long, in s, a slot that was handed on waited for its next request.
    """

    def __init__(
        self,
        parts: WorkerParts,
        progress_publisher: ProgressPublisher,
        abandoned_calls: AbandonedCalls,
        record_handover_gap: Callable[[float], object],
    ) -> None:
        self._parts, self._dispatcher, self._worker_loop = parts, parts.dispatcher, parts.worker_loop
        self._progress_publisher, self._abandoned_calls = progress_publisher, abandoned_calls
        self._record_handover_gap = record_handover_gap
        self._node_results = NodeResults(parts.dispatcher, parts.worker_loop)
        self._handovers: dict[str, float] = {}  # lease that came with a slot's release -> moment of that (monotonic s)

    def note_handover(self, lease: str, since_s: float) -> None:
        """Measure how long it takes until the request of this lease is sent."""
        self._handovers[lease] = since_s

    def forget(self, lease: str) -> None:
        self._handovers.pop(lease, None)

    async def call(self, worker_run: WorkerRun) -> Outcome | StopReason:
        """Call the server of a run, and return the outcome.  Raises DatabaseUnavailable."""
        run = worker_run.run
        if run.cancel_requested:
            return CANCELED_UNSENT
        stream = self._progress_publisher.stream(run.job.id, run.attempt)
        try:
            if not server_adapters.is_loaded(run.described_by):
                await self._worker_loop.run_in_thread(server_adapters.load, run.described_by)
            session = self.session_for(worker_run, stream)
            if session is None:
                return _SERVER_REMOVED
            outcome = await self._call(worker_run, session)
            return await self._node_results.verify(run, outcome) if session.is_node else outcome
        except DatabaseUnavailable:
            raise  # It says nothing of the server, nor of the job.
        except Misconfigured as error:
            return Outcome(
                OutcomeKind.RETRY, code="misconfigured", message=f"The model's configuration is wrong: {error}."
            )
        except Exception as error:
            log.exception("run_failed", job_id=run.job.id)
            message = f"The worker failed under it: {type(error).__name__}."
            return Outcome(OutcomeKind.LOST, code="internal_error", message=message)
        finally:
            stream.close()

    def session_for(self, worker_run: WorkerRun, stream: ProgressStream) -> ServerSession | None:
        """Return the session with the server of a run, whose description is loaded; None: the server was removed.

        Raises Misconfigured.
        """
        run, catalog = worker_run.run, self._dispatcher.catalog.cached()
        server = server_adapters.adapter_of_run(catalog, run.server, run.job.model, run.described_by, run.sent_to)
        return None if server is None else ServerSession(server, self._worker_loop.http, stream)

    def config_of(self, run: Run) -> ModelConfig:
        """Return the configuration for a run.  A model is not removed while it has runs."""
        model = self._dispatcher.catalog.cached().model(run.job.model)
        found = model if model is not None else self._dispatcher.catalog.resolve(run.job.model)
        return apply_terms(found.config, run.terms)

    async def _call(self, worker_run: WorkerRun, session: ServerSession) -> Outcome | StopReason:
        """Raises DatabaseUnavailable, UnknownModel."""
        run, catalog = worker_run.run, self._dispatcher.catalog.cached()
        requests = RunRequests(
            run,
            self.config_of(run),
            session.description,
            _model_version(catalog, run.server, run.job.model),
            changes_model=session.description.asks_for_swap and worker_run.offer.changes_model,
        )
        call = ServerCall(
            worker_run.active,
            worker_run.watch,
            session,
            requests,
            DatabaseRunStore(worker_run, self._parts),
            has_one_slot=_has_one_slot(catalog, run.server),
            may_be_at_server=worker_run.offer.is_resumption,
        )
        lease = worker_run.active.lease.name
        if (since_s := self._handovers.pop(lease, None)) is not None:
            self._record_handover_gap(time.monotonic() - since_s)
        outcome = await call.run()
        self._abandoned_calls.note(lease, session, requests)
        return outcome


def _model_version(catalog: CatalogSnapshot, server: str, model: str) -> str:
    """Return a model's version, as its server was registered for it; "": it was registered without."""
    found = catalog.servers.get(server)
    return "" if found is None else format_attribute(found.declared(model, "model_version") or "")


def _has_one_slot(catalog: CatalogSnapshot, server: str) -> bool:
    """Return whether a server has no more than one slot."""
    found = catalog.servers.get(server)
    return found is not None and found.slots == 1
