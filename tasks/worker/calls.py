"""How a run's server is called: by its description, at the address of today or of the run's beginning."""

import time
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from routing.dispatch.dispatcher import Dispatcher
from routing.dispatch.outcome import Outcome, OutcomeKind, StopReason
from slotkeeper.clock import now_ms
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.values import format_attribute
from tasks import server_adapters
from tasks.server_adapters import Misconfigured
from tasks.servers import ServerSession
from tasks.worker.abandoned import AbandonedCalls
from tasks.worker.event_loop import WorkerLoop
from tasks.worker.progress_publisher import ProgressPublisher, ProgressStream
from tasks.worker.rights import LeaseCheck
from tasks.worker.server_call import ServerCall
from tasks.worker.worker_run import WorkerRun

log = structlog.get_logger(__name__)


class ServerCalls:
    """The server calls of one worker's runs.

    `note_gap`: is told how long a slot that was handed on waited for its next request, in s.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        engine: WorkerLoop,
        saying: ProgressPublisher,
        rights: LeaseCheck,
        abandoned: AbandonedCalls,
        record_handover_gap: Callable[[float], object],
    ) -> None:
        self._dispatcher, self._engine, self._saying = dispatcher, engine, saying
        self._rights, self._abandoned, self._record_handover_gap = rights, abandoned, record_handover_gap
        self._handed_on: dict[str, float] = {}  # leases that came with a slot's release, and since when (monotonic s)

    def note_handover(self, lease: str, since_s: float) -> None:
        """Measure how long it takes until the request of this lease is sent."""
        self._handed_on[lease] = since_s

    def forget(self, lease: str) -> None:
        self._handed_on.pop(lease, None)

    async def call(self, own: WorkerRun) -> Outcome | StopReason:
        """Call the server, and return what came of it.  Raises DatabaseUnavailable."""
        run = own.run
        if run.cancel_requested:
            return Outcome(OutcomeKind.CANCELED, message="Canceled before it was sent.")
        speech = self._saying.stream(run.job.id, run.attempt)
        try:
            if not server_adapters.is_loaded(run.described_by):
                await self._engine.run_in_thread(server_adapters.load, run.described_by)
            live = self.session_for(own, speech)
            swap = live is not None and live.description.asks_for_swap and own.offer.changes_model
            runner = self._runner(own, live, swap)
            if (since_s := self._handed_on.pop(own.active.lease.name, None)) is not None:
                self._record_handover_gap(time.monotonic() - since_s)
            outcome = await runner.run()
            if live is not None:
                self._abandoned.note(own.active.lease.name, live, runner.poll_call)
            return outcome
        except DatabaseUnavailable:
            raise  # It says nothing of the server, nor of the job.
        except Misconfigured as error:
            return Outcome(
                OutcomeKind.RETRY, code="misconfigured", message=f"The model's configuration is wrong: {error}."
            )
        except Exception as error:
            log.exception("run_failed", job_id=run.job.id)
            said = f"The worker failed under it: {type(error).__name__}."
            return Outcome(OutcomeKind.LOST, code="internal_error", message=said)
        finally:
            speech.close()

    def session_for(self, own: WorkerRun, speech: ProgressStream) -> ServerSession | None:
        """Return what speaks to the server of a run; None: it was removed.  Its description is known.

        Raises Misconfigured.
        """
        run, catalog = own.run, self._dispatcher.catalog.cached()
        server = server_adapters.adapter_of_run(catalog, run.server, run.job.model, run.described_by, run.sent_to)
        return None if server is None else ServerSession(server, self._engine.http, speech)

    def config_of(self, model: str) -> ModelConfig:
        """Return the configuration of a model.  A model is not removed while it has runs."""
        found = self._dispatcher.catalog.cached().model(model)
        return found.config if found is not None else self._dispatcher.catalog.resolve(model).config

    def _runner(self, own: WorkerRun, live: ServerSession | None, swap: bool) -> ServerCall:
        """Raises UnknownModel."""
        run, catalog = own.run, self._dispatcher.catalog.cached()
        return ServerCall(
            own.active,
            own.watch,
            self.config_of(run.job.model),
            live,
            partial(self._note_remote, own),
            _version_at(catalog, run.server, run.job.model),
            swap,
            self._rights.is_still_held,
            partial(self._engine.run_in_thread, self._dispatcher.longest_usual_ms, run.job.model),
            _has_one_slot(catalog, run.server),
            may_be_at_server=own.offer.is_resumption,
        )

    def _note_remote(self, own: WorkerRun, remote_id: str) -> Awaitable[bool]:
        run = own.run
        return own.io.commit(self._dispatcher.store.remote_id_write(run.job.id, run.attempt, remote_id, now_ms()))


def _version_at(catalog: CatalogSnapshot, server: str, model: str) -> str:
    """Return a model's version, as its server was registered for it; "": it was registered without."""
    found = catalog.servers.get(server)
    return "" if found is None else format_attribute(found.declared(model, "model_version") or "")


def _has_one_slot(catalog: CatalogSnapshot, server: str) -> bool:
    """Return whether a server has no more than one slot."""
    found = catalog.servers.get(server)
    return found is not None and found.slots == 1
