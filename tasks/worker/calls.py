"""How a run's server is called: by its description, at the address of today or of the run's beginning."""

import time
from collections.abc import Awaitable, Callable
from functools import partial

import structlog
from redis.exceptions import RedisError

from routing.dispatch.dispatcher import Dispatcher
from routing.dispatch.outcome import Outcome, OutcomeKind, StopReason
from routing.queue.leases import Lease
from slotkeeper.clock import now_ms
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.registry.catalog import CatalogSnapshot
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.values import format_attribute
from tasks import descriptions
from tasks.descriptions import Misconfigured
from tasks.said import Saying, Speech
from tasks.servers import Live
from tasks.worker.abandoned import Abandoned
from tasks.worker.engine import Engine
from tasks.worker.own_run import OwnRun
from tasks.worker.rights import Rights
from tasks.worker.runner import Runner

log = structlog.get_logger(__name__)


class Calls:
    """The server calls of one worker's runs.

    `note_gap`: is told how long a slot that was handed on waited for its next request, in s.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        engine: Engine,
        saying: Saying,
        rights: Rights,
        abandoned: Abandoned,
        note_gap: Callable[[float], object],
    ) -> None:
        self._dispatcher, self._engine, self._saying = dispatcher, engine, saying
        self._rights, self._abandoned, self._note_gap = rights, abandoned, note_gap
        self._handed_on: dict[str, float] = {}  # leases that came with a slot's release, and since when (monotonic s)

    def note_handed_on(self, lease: str, since_s: float) -> None:
        """Measure how long it takes until the request of this lease is sent."""
        self._handed_on[lease] = since_s

    def forget(self, lease: str) -> None:
        self._handed_on.pop(lease, None)

    async def outcome(self, own: OwnRun) -> Outcome | StopReason:
        """Call the server, and return what came of it.  Raises RecordUnavailable."""
        run = own.run
        if run.cancel_requested:
            return Outcome(OutcomeKind.CANCELED, message="Canceled before it was sent.")
        speech = self._saying.of(run.job.id, run.attempt)
        try:
            if not descriptions.is_known(run.described_by):
                await self._engine.run_in_thread(descriptions.learn, run.described_by)
            live = self.speak_to(own, speech)
            swap = live is not None and live.description.asks_for_swap and await self._swaps(own.active.lease)
            runner = self._runner(own, live, swap)
            if (since_s := self._handed_on.pop(own.active.lease.name, None)) is not None:
                self._note_gap(time.monotonic() - since_s)
            outcome = await runner.outcome()
            if live is not None:
                self._abandoned.note(own.active.lease.name, live, runner.question)
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
            speech.end()

    def speak_to(self, own: OwnRun, speech: Speech) -> Live | None:
        """Return what speaks to the server of a run; None: it was removed.  Its description is known.

        Raises Misconfigured.
        """
        run, catalog = own.run, self._dispatcher.catalog.cached()
        server = descriptions.server_of(catalog, run.server, run.job.model, run.described_by, run.sent_to)
        return None if server is None else Live(server, self._engine.wires, speech)

    def config_of(self, model: str) -> ModelConfig:
        """Return the configuration of a model.  A model is not removed while it has runs."""
        found = self._dispatcher.catalog.cached().model(model)
        return found.config if found is not None else self._dispatcher.catalog.resolve(model).config

    def _runner(self, own: OwnRun, live: Live | None, swap: bool) -> Runner:
        """Raises UnknownModel."""
        run, catalog = own.run, self._dispatcher.catalog.cached()
        return Runner(
            own.active,
            own.watch,
            self.config_of(run.job.model),
            live,
            partial(self._note_remote, own),
            _version_at(catalog, run.server, run.job.model),
            swap,
            self._rights.holds,
            partial(self._engine.run_in_thread, self._dispatcher.longest_usual_ms, run.job.model),
            _has_one_slot(catalog, run.server),
        )

    def _note_remote(self, own: OwnRun, remote_id: str) -> Awaitable[bool]:
        run = own.run
        return own.io.commit(self._dispatcher.store.remote_id_write(run.job.id, run.attempt, remote_id, now_ms()))

    async def _swaps(self, lease: Lease) -> bool:
        """Whether the server has to change its model for this run, as far as is known."""
        try:
            return await self._engine.redis(self._dispatcher.leases.swaps(lease))
        except RedisError:
            return True


def _version_at(catalog: CatalogSnapshot, server: str, model: str) -> str:
    """Return a model's version, as its server was registered for it; "": it was registered without."""
    found = catalog.servers.get(server)
    return "" if found is None else format_attribute(found.declared(model, "model_version") or "")


def _has_one_slot(catalog: CatalogSnapshot, server: str) -> bool:
    """Return whether a server has no more than one slot."""
    found = catalog.servers.get(server)
    return found is not None and found.slots == 1
