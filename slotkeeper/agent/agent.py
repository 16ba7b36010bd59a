"""The agent as a whole: its models, its runs, and its connection, which is made again whenever it ends."""

import asyncio
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.exceptions import ConnectionClosed, InvalidURI

from slotkeeper import signatures
from slotkeeper.agent.config import AgentConfig, InvalidConfig
from slotkeeper.agent.forward import forward_to, refuses_connections
from slotkeeper.agent.gateway_link import GatewayLink, close_code
from slotkeeper.agent.identity import AgentIdentity, find_new_key, use_new_key
from slotkeeper.agent.node_routes import NodeRoutes, run_from_facts
from slotkeeper.agent.owner_controls import OwnerControls
from slotkeeper.agent.run_journal import RunFacts, RunJournal, read_or_make_start
from slotkeeper.serve.run_executor import RunExecutor
from slotkeeper.serve.run_scheduler import ResultRetention, Run, RunEnd, RunScheduler, State
from slotkeeper.serve.served_function import Context, Model, TargetError, adapt, load
from slotkeeper.tunnel import handshake

log = logging.getLogger("slotkeeper.agent")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_STEADY_S = 60.0  # After a connection that lasted as long, the next pause is the first one.
_OTHER_INSTANCE_PAUSE_S = 30.0
_HOUSEKEEPING_S = 1.0
_PRUNE_EVERY_S = 600.0
_FURTHER_THREADS = 8
_MEMORY = ResultRetention(runs=200, result_bytes=64 << 20)  # Older results are read from the journal.


class Stopped(Exception):
    """The agent must not go on; the text says why.  status: the exit status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Agent:
    """An agent, which `run` keeps connected.  Raises InvalidConfig: a model cannot be loaded; JournalFailed."""

    def __init__(self, config: AgentConfig, identity: AgentIdentity, *, grace_s: float = 10.0) -> None:
        self._config, self._identity, self._grace_s = config, identity, grace_s
        self._owner = OwnerControls(config.state_dir, config.hours)
        self._journal = RunJournal(config.state_dir / "runs")
        self._scheduler = RunScheduler(config.slots, 0, _MEMORY)
        self._executor = RunExecutor(self._scheduler, _model_of(config), self._journal)
        self._held = self._restore()
        self._started = read_or_make_start(config.state_dir, keep=bool(self._held))
        self._digest = ""
        self._is_stopping = False
        self._away: set[str] = set()  # local servers that refuse connections
        self._deadlines: dict[Run, float] = {}
        self._has_new_start = False  # No run of an earlier process is left, and `started` has to change.
        self._new_key: Ed25519PrivateKey | None = None
        self._threads = ThreadPoolExecutor(2 * config.slots + _FURTHER_THREADS, thread_name_prefix="request")
        self._links: set[GatewayLink] = set()
        self.routes = NodeRoutes(
            self._scheduler,
            self._executor,
            self._journal,
            identity,
            config,
            why_not=self.why_not,
            digest=lambda: self._digest,
            started=lambda: self._started,
            on_start=self._note_deadline,
        )

    def why_not(self) -> str:
        """Return why the node takes no jobs now; "": it does."""
        why = self._owner.why_not()
        if self._away:
            why = f"the local server at {min(self._away)} refuses connections"
        if self._is_stopping:
            why = "the agent is stopping"
        return handshake.clean_reason(why)

    async def run(self, stop: asyncio.Event) -> None:
        """Stay connected until `stop` is set.  Raises Stopped: the gateway refuses this node."""
        housekeeping = asyncio.ensure_future(self._keep_house())
        connecting = asyncio.ensure_future(self._stay_connected())
        stopping = asyncio.ensure_future(stop.wait())
        done, _ = await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping in done:
            await self._shut_down()
        stopping.cancel()
        connecting.cancel()
        housekeeping.cancel()
        for link in list(self._links):
            await link.close()
        self._executor.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if connecting in done:
            connecting.result()

    async def _shut_down(self) -> None:
        """Take no more jobs, wait for those that run, and cancel those that are left."""
        self._is_stopping = True
        self._report_status()
        self._scheduler.close()
        if not await asyncio.to_thread(self._scheduler.wait_idle, self._grace_s):
            self._scheduler.cancel_all()
            await asyncio.to_thread(self._scheduler.wait_idle, 1.0)
        waits = [asyncio.ensure_future(link.is_idle.wait()) for link in self._links]
        if waits:  # The last responses are on their way.
            _, pending = await asyncio.wait(waits, timeout=2.0)
            for wait in pending:
                wait.cancel()

    # -- the connection --------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        """Connect again whenever a connection ends, after a random pause.  Raises Stopped."""
        failures = 0
        while True:
            link = self._make_link()
            self._links.add(link)
            began = time.monotonic()
            serving = asyncio.ensure_future(self._serve(link))
            going = asyncio.ensure_future(link.gateway_stops.wait())
            done, _ = await asyncio.wait({serving, going}, return_when=asyncio.FIRST_COMPLETED)
            going.cancel()
            if serving not in done:  # It goes on beside the next connection until its requests have ended.
                log.warning("the gateway stops: connecting elsewhere")
                failures = 0
                await asyncio.sleep(random.uniform(0, _FIRST_PAUSE_S))
                continue
            pause_s = serving.result()
            failures = 0 if time.monotonic() - began > _STEADY_S else failures + 1
            longest_s = (
                min(_FIRST_PAUSE_S * 2 ** min(failures - 1, 10), _LONGEST_PAUSE_S) if failures else _FIRST_PAUSE_S
            )
            await asyncio.sleep(max(pause_s, random.uniform(0, longest_s)))

    async def _serve(self, link: GatewayLink) -> float:
        """Serve one connection, and return how long to wait at least before the next.  Raises Stopped."""
        announcing = asyncio.ensure_future(self._announce(link))
        try:
            await link.run()
        except ConnectionClosed as closed:
            return _pause_after(*close_code(closed))
        except (InvalidURI, InvalidConfig) as error:
            raise Stopped(2, f"the gateway cannot be dialed: {error}") from None
        except Exception as error:  # Whatever it is, runs go on, and the next connection may succeed.
            log.warning("no connection to %s: %s", self._config.gateway, error or type(error).__name__)
        finally:
            announcing.cancel()
            self._links.discard(link)
        return 0.0

    async def _announce(self, link: GatewayLink) -> None:
        await link.is_ready.wait()
        log.warning("connected to %s as %s", self._config.gateway, self._identity.name)
        link.report_status()

    def _make_link(self) -> GatewayLink:
        def set_digest(digest: str) -> None:
            self._digest = digest

        return GatewayLink(
            self._config, self._identity, self.routes, self._threads, self.why_not, set_digest, self._use_key
        )

    def _send_new_key(self) -> None:
        """Offer the gateway a key that `slotkeeper agent rotate` has made."""
        key = find_new_key(self._config.state_dir) if self._new_key is None else None
        if key is None:
            return
        for link in self._links:
            if link.is_ready.is_set():
                link.send_new_key(key)
                self._new_key = key

    def _use_key(self, key_id: str) -> None:
        """Connect with a new key from now on: the gateway has stored it, and retires the old one then."""
        if self._new_key is None or key_id != signatures.key_id(signatures.public_key_of(self._new_key)):
            return
        self._identity = use_new_key(self._config.state_dir, self._identity)
        self.routes.identity, self._new_key = self._identity, None
        log.warning("connecting again with the new key %s", key_id)
        for link in list(self._links):
            link.gateway_stops.set()

    def _report_status(self) -> None:
        for link in self._links:
            link.report_status()

    # -- runs of an earlier process, deadlines, the journal ----------------------------------------------------

    def _restore(self) -> list[tuple[Run, RunFacts]]:
        """Restore the runs of earlier processes, and return those that a local server may still carry out."""
        for stored in self._journal.list_latest(_MEMORY.runs, _MEMORY.result_bytes, _MEMORY.age_s):
            run = run_from_facts(stored.facts)
            run.ending = stored.ending
            self._scheduler.restore(run)
        held = list[tuple[Run, RunFacts]]()
        for facts in self._journal.list_unended():
            if facts.is_forwarded and len(held) < self._config.slots:
                run = run_from_facts(facts)
                self._scheduler.restore(run)
                held.append((run, facts))
        return held

    def _note_deadline(self, run: Run, deadline_ms: int) -> None:
        self._deadlines[run] = time.monotonic() + deadline_ms / 1000

    async def _keep_house(self) -> None:
        pruned_s = 0.0
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            try:
                await asyncio.to_thread(self._check_local_servers)
                self._cancel_overdue()
                self._report_status()
                self._send_new_key()
                if time.monotonic() - pruned_s > _PRUNE_EVERY_S:
                    pruned_s = time.monotonic()
                    await asyncio.to_thread(self._journal.prune)
            except Exception as error:  # Without it, no pause is reported and no deadline kept.
                log.warning("housekeeping failed: %r", error)

    def _cancel_overdue(self) -> None:
        """Cancel runs whose time is over, also without a connection."""
        now = time.monotonic()
        for run, until_s in list(self._deadlines.items()):
            if until_s < now:
                self._scheduler.cancel(run.id)
            if until_s < now or run.ending is not None:
                del self._deadlines[run]

    def _check_local_servers(self) -> None:
        """See which local servers listen, and free the slots of earlier runs that none can carry out any more."""
        urls = {entry.forward for entry in self._config.models.values() if entry.forward is not None}
        self._away = {url for url in urls if refuses_connections(url)}
        for run, facts in list(self._held):
            entry = self._config.models.get(run.model)
            is_over = self._journal.now_ms() - facts.started_ms > self._config.max_run_s * 1000
            if entry is None or entry.forward is None or entry.forward in self._away or is_over:
                self._scheduler.finish(run, RunEnd(State.FAILED, error="the agent was restarted", retryable=True))
                self._held.remove((run, facts))
                self._has_new_start = not self._held
        if self._has_new_start and self._scheduler.health().active == 0:  # Runs of this process would count as ended.
            self._started, self._has_new_start = read_or_make_start(self._config.state_dir, keep=False), False


def _pause_after(code: int, reason: str) -> float:
    """Return how long to wait at least after the gateway has closed a connection.  Raises Stopped."""
    match code:
        case handshake.CLOSE_REVOKED:
            raise Stopped(3, f"the gateway refuses this node: {reason}")
        case handshake.CLOSE_REFUSED:
            raise Stopped(2, f"the gateway refuses this node: {reason}")
        case handshake.CLOSE_OTHER_INSTANCE:
            log.warning("another agent with this key is connected; trying again in %g s", _OTHER_INSTANCE_PAUSE_S)
            return _OTHER_INSTANCE_PAUSE_S
        case _:
            log.warning("the connection ended: %s", reason or code)
            return 0.0


def _model_of(config: AgentConfig) -> Model:
    """Return a callable for the runs of all models.  Raises InvalidConfig."""
    models: dict[str, Model] = {}
    for name, entry in config.models.items():
        try:
            models[name] = forward_to(entry.forward) if entry.forward else adapt(load(entry.function or ""))
        except TargetError as error:
            raise InvalidConfig(f"models.{name}.function: {error}") from None

    def run(context: Context) -> Any:
        return models[context.model](context)

    return run


def run_until_signaled(agent: Agent) -> None:
    """Run an agent until SIGTERM or SIGINT; a second signal ends the process at once.  Raises Stopped."""

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _on_signal(stop))
        await agent.run(stop)

    assert threading.current_thread() is threading.main_thread()
    with suppress(KeyboardInterrupt):
        asyncio.run(run())


def _on_signal(stop: asyncio.Event) -> Callable[[], None]:
    def handle() -> None:
        if stop.is_set():
            os._exit(130)  # Functions that do not end would keep the process.
        stop.set()

    return handle
