"""The next job gets a slot only after the server has ended the last run in it, by the server's own count (SLOT-1).

The server is a real HTTP server that continues its runs after a cancellation.
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
from tests.support.harness import Harness
from tests.support.holding import HoldingServer
from tests.support.scripted import refused_url
from tests.tasks.worker.one_run import FakeRunStore, make_server_call
from tools.cluster.direct_starts import store_remote_id
from tools.cluster.stack import eventually

_EMPTY_REPORT = ServerReport(True)
sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def server(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Iterator[HoldingServer]:
    passes.run_tasks_with(monkeypatch, harness.dispatcher)
    monkeypatch.setattr(server_call, "_CANCEL_WAIT_S", 0.05)
    with HoldingServer(asynchronous=True) as server:
        harness.catalog.register("zimg", "gpu", server.endpoint, 1, harness.now)
        harness.catalog.configure("zimg", {"model_type": "async", "poll_interval": 0.01}, harness.now)
        rebuild.refresh_fleet(harness.dispatcher, "zimg")
        yield server


def _check_server(harness: Harness, *, has_quarantine: bool = False) -> int:
    """Read the server's report, apply it as maintenance does, and return the number of freed slots."""
    report = passes.read_report(harness.dispatcher.catalog.get().servers["gpu"], has_quarantine=has_quarantine)
    return passes.apply_reports(harness.dispatcher, {"gpu": report})


class ThreadedCall:
    """A server call that runs in a separate thread with a separate event loop."""

    def __init__(self, harness: Harness, active: ActiveRun, session: Any = None) -> None:
        self._stage, self._active, self._session = harness, active, session
        self._loop = asyncio.new_event_loop()
        self.watch = LeaseWatch(active.lease, self._loop.call_soon_threadsafe)
        self._outcomes: list[Any] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for_outcome(self) -> Any:
        """Wait for the end of the call, and return its outcome."""
        self._thread.join(30)
        return self._outcomes[0]

    def _run(self) -> None:
        self._outcomes.append(self._loop.run_until_complete(self._call()))

    async def _call(self) -> Outcome | StopReason:
        harness, run, http = self._stage, self._active.run, HttpClient(self._loop)
        model = harness.dispatcher.catalog.resolve(run.job.model)

        store = FakeRunStore(
            lambda remote_id: store_remote_id(harness.store, run.job.id, run.attempt, remote_id, harness.now)
        )
        url = harness.dispatcher.catalog.get().servers[run.server].endpoints[run.job.model]
        session = self._session or ServerSession(adapter_for(url, model, run.described_by), http)
        return await make_server_call(self._active, self.watch, model.config, session, store).run()


def _run(harness: Harness, active: ActiveRun, meanwhile: Callable[[LeaseWatch], None] | None = None) -> State | None:
    """Run a job as a worker does, and return its new state.

    `meanwhile` is called when the server has accepted the job.  None means that the job had ended before.
    """
    call = ThreadedCall(harness, active)
    try:
        if meanwhile is not None:
            eventually(lambda: harness.job(active.run.job.id).remote_id, "the server has accepted the job")
            meanwhile(call.watch)
    finally:
        outcome = call.wait_for_outcome()
    run, config = active.run, harness.dispatcher.catalog.resolve(active.run.job.model).config
    canceling = call.watch.cancel
    decision = decide(run, outcome, config, harness.dispatcher.settings, harness.now, canceling=canceling)
    moved = end_in_order(harness.dispatcher, active, decision).moved
    return None if moved is None else moved.to


def _time_out(harness: Harness) -> str:
    harness.catalog.configure("zimg", {"model_type": "async", "poll_interval": 0.01, "max_poll_time": 0.3}, harness.now)
    job_id = harness.submit(id="first")
    assert _run(harness, harness.start()) is State.DELAYED
    return job_id


def _cancel(harness: Harness) -> str:
    job_id = harness.submit(id="first")

    def cancel(watch: LeaseWatch) -> None:
        harness.dispatcher.cancel(job_id)
        watch.request_cancel()

    assert _run(harness, harness.start(), cancel) is State.CANCELED
    return job_id


def _pass_deadline(harness: Harness) -> str:
    job_id = harness.submit(id="first", ttl_s=600)
    active = harness.start()

    def expire(watch: LeaseWatch) -> None:
        harness.later(600_000)
        assert deadlines.expire_deadlines(harness.dispatcher) == 1
        watch.request_cancel()

    assert _run(harness, active, expire) is None, "maintenance has ended the job"
    return job_id


@sqlite
@pytest.mark.parametrize(
    ("end_run", "end"),
    [(_time_out, "timed out"), (_cancel, "was canceled"), (_pass_deadline, "passed its deadline")],
)
def test_slot_1_whatever_ends_a_run_its_server_never_runs_two_in_one_slot(harness, server, end_run, end) -> None:
    server.hold("first")
    first = end_run(harness)
    second = harness.submit(id="second")
    harness.notifications.offers.clear()
    harness.later(MIN_AGE_MS)
    assert _check_server(harness) == 0 and harness.notifications.offers == [], "the server still runs the job"
    status = harness.explained(second)
    assert f"slot gpu-slot0 is withheld: job {first!r} {end} here" in status and "its server may still run it" in status

    server.release(first)
    eventually(lambda: not server.active, "the server's run ends")
    assert _check_server(harness) == 1
    assert [offer.job_id for offer in harness.notifications.offers if offer.job_id == second] == [second]
    active = harness.start()
    assert _run(harness, active) is State.COMPLETED
    assert server.at_once == 1 and len(server.runs) == 2


@sqlite
def test_a_slot_is_used_again_when_the_status_shows_that_its_run_has_ended(harness, server) -> None:
    server.hold("first")
    first = _time_out(harness)
    (row,) = quarantine.list_all(harness.database)
    passes.check_quarantined_run(row)
    quarantined_slots.apply_report(
        harness.dispatcher,
        passes.of(harness.dispatcher).checks.state,
        harness.catalog.read().servers["gpu"],
        _EMPTY_REPORT,
        [row],
        [],
    )
    assert quarantine.list_all(harness.database) == [row], "the status shows that the run continues"
    server.release(first)
    eventually(lambda: not server.active, "the server's run ends")
    passes.check_quarantined_run(row)
    assert quarantine.list_all(harness.database) == []


@sqlite
def test_a_slot_is_used_again_when_no_process_listens_at_its_servers_address(harness, monkeypatch) -> None:
    passes.run_tasks_with(monkeypatch, harness.dispatcher)
    harness.catalog.register("zimg", "gpu", f"{refused_url()}/generate", 1, harness.now)
    rebuild.refresh_fleet(harness.dispatcher, "zimg")
    harness.submit(id="first")
    active = harness.start()
    end_run_with(harness.dispatcher, active, Reason.CANCEL_REQUESTED, server_still_running="canceled")
    harness.later(MIN_AGE_MS)
    assert _check_server(harness) == 0, "maintenance checks the address only for a server with a quarantined slot"
    assert _check_server(harness, has_quarantine=True) == 1 and quarantine.list_all(harness.database) == []


# -- a worker that stops -----------------------------------------------------------------------------------------


@sqlite
def test_a_run_that_a_stopping_worker_hands_back_is_joined_by_the_next_worker(harness, monkeypatch) -> None:
    with HoldingServer() as server:
        harness.catalog.register("zimg", "gpu", server.endpoint, 1, harness.now)
        rebuild.refresh_fleet(harness.dispatcher, "zimg")
        server.hold("first")
        job_id, active = harness.submit(id="first"), harness.start()
        call = ThreadedCall(harness, active)
        server.wait_for(job_id, 30)
        call.watch.end("stop")
        assert call.wait_for_outcome() is StopReason.STOPPED
        assert hand_back(harness.dispatcher, active)
        job = harness.job(job_id)
        assert (job.state, job.why, job.crashes, job.failures) == (State.QUEUED, Reason.HANDED_BACK, 0, 0)
        assert [(offer.job_id, offer.slot) for offer in harness.notifications.offers] == [(job_id, active.lease.slot)]
        server.release(job_id)
        assert _run(harness, harness.start("w2")) is State.COMPLETED
        assert len(server.runs) == 1, "the server joins the repeated request to the run, by its idempotency key"


# -- a confirmed cancellation, by the server's description -------------------------------------------------------


class ConfirmingSession:
    """A session of a server that confirms each cancellation; `continues`: whether its status still shows the run."""

    is_broken = False

    def __init__(self, frees_slot: str | None, continues: bool) -> None:
        self.description = Description(cancel=Cancel(frees_slot=frees_slot) if frees_slot else None)
        self._continues, self._was_canceled = continues, False

    async def submit(self, _: object) -> Outcome:
        return Outcome(OutcomeKind.PENDING, remote_id="r1")

    async def status(self, *_: object) -> Outcome:
        has_ended = self._was_canceled and not self._continues
        return Outcome(OutcomeKind.CANCELED if has_ended else OutcomeKind.PENDING)

    async def cancel(self, *_: object) -> bool:
        self._was_canceled = True
        return True


def _call_outcome(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, session: ConfirmingSession, *, canceled: bool
) -> Outcome:
    """Run a call that is canceled or times out, and return its outcome."""
    config = {"model_type": "async", "poll_interval": 0.01, "max_poll_time": 600.0 if canceled else 0.05}
    harness.register(**config)
    harness.submit()
    monkeypatch.setattr(server_call, "_CANCEL_WAIT_S", 0.05)
    calls: list[ThreadedCall] = []
    status = session.status

    async def cancel_and_read_status(*args: object) -> Outcome:
        while not calls:
            await asyncio.sleep(0.001)
        calls[0].watch.request_cancel()
        return await status(*args)

    if canceled:
        monkeypatch.setattr(session, "status", cancel_and_read_status)
    calls.append(call := ThreadedCall(harness, harness.start(), session))
    outcome = call.wait_for_outcome()
    assert isinstance(outcome, Outcome)
    return outcome


@sqlite
@pytest.mark.parametrize(
    ("frees_slot", "continues", "server_still_running"),
    [
        ("immediate", True, False),  # The confirmation frees the slot.
        ("eventual", True, True),  # The status shows when the run ends.
        ("eventual", False, False),
        ("no", True, True),  # Neither confirmation nor status frees the slot.
        ("no", False, True),
        (None, True, True),  # The server has no cancel request.
    ],
)
def test_the_description_of_a_server_decides_whether_a_cancel_releases_the_slot(
    harness, monkeypatch, frees_slot, continues, server_still_running
) -> None:
    outcome = _call_outcome(harness, monkeypatch, ConfirmingSession(frees_slot, continues), canceled=True)
    assert (outcome.kind, outcome.server_still_running) == (OutcomeKind.CANCELED, server_still_running)


@sqlite
@pytest.mark.parametrize(
    ("frees_slot", "server_still_running"), [("immediate", False), ("eventual", True), ("no", True)]
)
def test_a_run_that_timed_out_keeps_its_slot_unless_the_server_confirms_its_end(
    harness, monkeypatch, frees_slot, server_still_running
) -> None:
    outcome = _call_outcome(harness, monkeypatch, ConfirmingSession(frees_slot, continues=True), canceled=False)
    assert (outcome.kind, outcome.code, outcome.server_still_running) == (
        OutcomeKind.RETRY,
        "timed_out",
        server_still_running,
    )


@sqlite
@pytest.mark.parametrize("attempt, is_own_attempt", [(1, True), (2, False)])
def test_slot_1_a_status_request_does_not_use_the_description_of_a_later_attempt(
    harness, server, monkeypatch, attempt, is_own_attempt
) -> None:
    """A later attempt of its job may run on a server of another kind, which would call the run unknown."""
    monkeypatch.setattr(health_checks, "dispatcher", lambda: harness.dispatcher)
    server.hold("first")
    first = _time_out(harness)
    (row,) = quarantine.list_all(harness.database)
    harness.catalog.configure("zimg", {"description": {"mode": "async"}}, harness.now, '{"mode": "async"}')
    harness.dispatcher.catalog.refresh()
    model_description = harness.catalog.read().find_description("gpu", "zimg")
    job = replace(harness.job(first), attempt=attempt, described_by="another")
    assert model_description is not None
    assert health_checks.description_of_attempt(job, row) == ("another" if is_own_attempt else model_description)
    server.release(first)
