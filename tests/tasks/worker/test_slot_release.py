"""A slot is given to the next job when its server has let go of the last run, as the server itself counts (SLOT-1).

The server is a real one, over HTTP, that goes on with a run whatever it is told.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from routing.dispatch.decision import decide
from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.outcome import Outcome, OutcomeKind, StopReason
from routing.maintenance import deadlines, quarantined_slots, rebuild
from routing.maintenance.server_report import MIN_AGE_MS, ServerReport
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.states import Reason, State
from tasks import health_checks
from tasks.server_adapters import adapter_for
from tasks.servers import Description, HttpClient, ServerSession
from tasks.servers.description import Cancel
from tasks.worker import server_call
from tasks.worker.heartbeat import LeaseWatch
from tests.support import passes
from tests.support.ends import end_in_order, end_run_with, hand_back
from tests.support.holding import HoldingServer
from tests.support.scripted import refused_url
from tests.support.stage import Stage
from tests.tasks.worker.one_run import FakeRunStore, make_server_call
from tools.cluster.direct_starts import store_remote_id
from tools.cluster.stack import eventually

_TELLS_NOTHING = ServerReport(True)
sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def server(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[HoldingServer]:
    passes.run_tasks_with(monkeypatch, stage.dispatcher)
    monkeypatch.setattr(server_call, "_CANCEL_WAIT_S", 0.05)
    with HoldingServer(asynchronous=True) as found:
        stage.catalog.register("zimg", "gpu", found.endpoint, 1, stage.now)
        stage.catalog.configure("zimg", {"model_type": "async", "poll_interval": 0.01}, stage.now)
        rebuild.refresh_fleet(stage.dispatcher, "zimg")
        yield found


def _look(stage: Stage, *, has_quarantine: bool = False) -> int:
    """What maintenance does: ask the server, and heed its report."""
    report = passes.read_report(stage.dispatcher.catalog.get().servers["gpu"], has_quarantine=has_quarantine)
    return passes.apply_reports(stage.dispatcher, {"gpu": report})


class Watching:
    """A run that is watched in an event loop of its own."""

    def __init__(self, stage: Stage, task: ActiveRun, live: Any = None) -> None:
        self._stage, self._task, self._live = stage, task, live
        self._loop = asyncio.new_event_loop()
        self.watch = LeaseWatch(task.lease, self._loop.call_soon_threadsafe)
        self._found: list[Any] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def outcome(self) -> Any:
        """What came of it."""
        self._thread.join(30)
        return self._found[0]

    def _run(self) -> None:
        self._found.append(self._loop.run_until_complete(self._watch()))

    async def _watch(self) -> Outcome | StopReason:
        stage, run, http = self._stage, self._task.run, HttpClient(self._loop)
        model = stage.dispatcher.catalog.resolve(run.job.model)

        store = FakeRunStore(
            lambda remote_id: store_remote_id(stage.store, run.job.id, run.attempt, remote_id, stage.now)
        )
        url = stage.dispatcher.catalog.get().servers[run.server].endpoints[run.job.model]
        live = self._live or ServerSession(adapter_for(url, model, run.described_by), http)
        return await make_server_call(self._task, self.watch, model.config, live, store).run()


def _run(stage: Stage, task: ActiveRun, meanwhile: Callable[[LeaseWatch], None] | None = None) -> State | None:
    """Run it as a worker does; `meanwhile`: what happens once the server is at it.  Answers where that led."""
    watching = Watching(stage, task)
    try:
        if meanwhile is not None:
            eventually(lambda: stage.job(task.run.job.id).remote_id, "the server is at it")
            meanwhile(watching.watch)
    finally:
        outcome = watching.outcome()
    run, config = task.run, stage.dispatcher.catalog.resolve(task.run.job.model).config
    canceling = watching.watch.cancel
    decision = decide(run, outcome, config, stage.dispatcher.settings, stage.now, canceling=canceling)
    moved = end_in_order(stage.dispatcher, task, decision).moved
    return None if moved is None else moved.to


def _times_out(stage: Stage) -> str:
    stage.catalog.configure("zimg", {"model_type": "async", "poll_interval": 0.01, "max_poll_time": 0.3}, stage.now)
    job_id = stage.submit(id="first")
    assert _run(stage, stage.start()) is State.DELAYED
    return job_id


def _is_canceled(stage: Stage) -> str:
    job_id = stage.submit(id="first")

    def cancel(hold: LeaseWatch) -> None:
        stage.dispatcher.cancel(job_id)
        hold.request_cancel()

    assert _run(stage, stage.start(), cancel) is State.CANCELED
    return job_id


def _passes_its_deadline(stage: Stage) -> str:
    job_id = stage.submit(id="first", ttl_s=600)
    task = stage.start()

    def expire(hold: LeaseWatch) -> None:
        stage.later(600_000)
        assert deadlines.expire_deadlines(stage.dispatcher) == 1
        hold.request_cancel()

    assert _run(stage, task, expire) is None, "maintenance has ended it"
    return job_id


@sqlite
@pytest.mark.parametrize(
    ("ends", "how"),
    [(_times_out, "timed out"), (_is_canceled, "was canceled"), (_passes_its_deadline, "passed its deadline")],
)
def test_slot_1_whatever_ends_a_run_its_server_never_runs_two_in_one_slot(stage, server, ends, how) -> None:
    server.hold("first")
    first = ends(stage)
    second = stage.submit(id="second")
    stage.told.offers.clear()
    stage.later(MIN_AGE_MS)
    assert _look(stage) == 0 and stage.told.offers == [], "its server is at it"
    said = stage.explained(second)
    assert f"slot gpu-slot0 is withheld: job {first!r} {how} here" in said and "its server may still run it" in said

    server.release(first)
    eventually(lambda: not server.active, "the server's run ends")
    assert _look(stage) == 1
    assert [offer.job_id for offer in stage.told.offers if offer.job_id == second] == [second]
    task = stage.start()
    assert _run(stage, task) is State.COMPLETED
    assert server.at_once == 1 and len(server.runs) == 2


@sqlite
def test_a_slot_is_used_again_when_the_status_of_its_run_tells_the_end(stage, server) -> None:
    server.hold("first")
    first = _times_out(stage)
    (row,) = quarantine.list_all(stage.database)
    passes.check_quarantined_run(row)
    quarantined_slots.apply_report(
        stage.dispatcher,
        passes.of(stage.dispatcher).checks.state,
        stage.catalog.read().servers["gpu"],
        _TELLS_NOTHING,
        [row],
        [],
    )
    assert quarantine.list_all(stage.database) == [row], "its status tells that it goes on"
    server.release(first)
    eventually(lambda: not server.active, "the server's run ends")
    passes.check_quarantined_run(row)
    assert quarantine.list_all(stage.database) == []


@sqlite
def test_a_slot_is_used_again_when_no_process_listens_at_its_servers_address(stage, monkeypatch) -> None:
    passes.run_tasks_with(monkeypatch, stage.dispatcher)
    stage.catalog.register("zimg", "gpu", f"{refused_url()}/generate", 1, stage.now)
    rebuild.refresh_fleet(stage.dispatcher, "zimg")
    stage.submit(id="first")
    task = stage.start()
    end_run_with(stage.dispatcher, task, Reason.CANCEL_REQUESTED, server_still_running="canceled")
    stage.later(MIN_AGE_MS)
    assert _look(stage) == 0, "nobody looks at the address of a server that no slot waits for"
    assert _look(stage, has_quarantine=True) == 1 and quarantine.list_all(stage.database) == []


# -- a worker that is told to stop -------------------------------------------------------------------------------


@sqlite
def test_a_call_that_a_stopping_worker_waits_in_is_handed_back_and_joined_by_the_next(stage, monkeypatch) -> None:
    with HoldingServer() as server:
        stage.catalog.register("zimg", "gpu", server.endpoint, 1, stage.now)
        rebuild.refresh_fleet(stage.dispatcher, "zimg")
        server.hold("first")
        job_id, task = stage.submit(id="first"), stage.start()
        watching = Watching(stage, task)
        server.wait_for(job_id, 30)
        watching.watch.end("stop")
        assert watching.outcome() is StopReason.STOPPED
        assert hand_back(stage.dispatcher, task)
        job = stage.job(job_id)
        assert (job.state, job.why, job.crashes, job.failures) == (State.QUEUED, Reason.HANDED_BACK, 0, 0)
        assert [(offer.job_id, offer.slot) for offer in stage.told.offers] == [(job_id, task.lease.slot)]
        server.release(job_id)
        assert _run(stage, stage.start("w2")) is State.COMPLETED
        assert len(server.runs) == 1, "the call is repeated under its key, and joined"


# -- what a server's yes to a cancel is worth, by its description ------------------------------------------------


class Polite:
    """Says yes to a cancel, and then what `goes_on` has it say of the run."""

    is_broken = False

    def __init__(self, frees_slot: str | None, goes_on: bool) -> None:
        self.description = Description(cancel=Cancel(frees_slot=frees_slot) if frees_slot else None)
        self._goes_on, self.told = goes_on, False

    async def submit(self, _: object) -> Outcome:
        return Outcome(OutcomeKind.PENDING, remote_id="r1")

    async def status(self, *_: object) -> Outcome:
        return Outcome(OutcomeKind.CANCELED if self.told and not self._goes_on else OutcomeKind.PENDING)

    async def cancel(self, *_: object) -> bool:
        self.told = True
        return True


def _outcome(stage: Stage, monkeypatch: pytest.MonkeyPatch, polite: Polite, *, canceled: bool) -> Outcome:
    config = {"model_type": "async", "poll_interval": 0.01, "max_poll_time": 600.0 if canceled else 0.05}
    stage.register(**config)
    stage.submit()
    monkeypatch.setattr(server_call, "_CANCEL_WAIT_S", 0.05)
    begun: list[Watching] = []
    status = polite.status

    async def wanted_no_more(*args: object) -> Outcome:
        while not begun:
            await asyncio.sleep(0.001)
        begun[0].watch.request_cancel()
        return await status(*args)

    if canceled:
        monkeypatch.setattr(polite, "status", wanted_no_more)
    begun.append(watching := Watching(stage, stage.start(), polite))
    found = watching.outcome()
    assert isinstance(found, Outcome)
    return found


@sqlite
@pytest.mark.parametrize(
    ("frees_slot", "goes_on", "server_still_running"),
    [
        ("immediate", True, False),  # its yes is enough
        ("eventual", True, True),  # its yes is a promise, and its own status says when
        ("eventual", False, False),
        ("no", True, True),  # neither says anything of the slot
        ("no", False, True),
        (None, True, True),  # it cannot be told
    ],
)
def test_what_a_cancel_frees_is_as_the_server_is_described(
    stage, monkeypatch, frees_slot, goes_on, server_still_running
) -> None:
    outcome = _outcome(stage, monkeypatch, Polite(frees_slot, goes_on), canceled=True)
    assert (outcome.kind, outcome.server_still_running) == (OutcomeKind.CANCELED, server_still_running)


@sqlite
@pytest.mark.parametrize(
    ("frees_slot", "server_still_running"), [("immediate", False), ("eventual", True), ("no", True)]
)
def test_a_run_that_took_too_long_lingers_unless_a_yes_frees_its_slot(
    stage, monkeypatch, frees_slot, server_still_running
) -> None:
    outcome = _outcome(stage, monkeypatch, Polite(frees_slot, goes_on=True), canceled=False)
    assert (outcome.kind, outcome.code, outcome.server_still_running) == (
        OutcomeKind.RETRY,
        "timed_out",
        server_still_running,
    )


@sqlite
@pytest.mark.parametrize("attempt, own", [(1, True), (2, False)])
def test_slot_1_a_run_is_asked_about_in_its_own_servers_words(stage, server, monkeypatch, attempt, own) -> None:
    """A later attempt of its job may run on a server of another kind, which would call the run unknown."""
    monkeypatch.setattr(health_checks, "dispatcher", lambda: stage.dispatcher)
    server.hold("first")
    first = _times_out(stage)
    (row,) = quarantine.list_all(stage.database)
    stage.catalog.configure("zimg", {"description": {"mode": "async"}}, stage.now, '{"mode": "async"}')
    stage.dispatcher.catalog.refresh()
    of_model = stage.catalog.read().find_description("gpu", "zimg")
    job = replace(stage.job(first), attempt=attempt, described_by="another")
    assert of_model is not None
    assert health_checks.description_of_attempt(job, row) == ("another" if own else of_model)
    server.release(first)
