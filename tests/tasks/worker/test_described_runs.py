"""A run at a server with a description of its API: responses, pushed results and silence."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from routing.dispatch.decision import decide
from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.outcome import Outcome, OutcomeKind, StopReason
from routing.queue.leases import Lease
from slotkeeper import json_text
from slotkeeper.clock import now_ms
from slotkeeper.jobs.values import QueuedJob, Run
from slotkeeper.registry.model_config import ModelConfig
from tasks.servers import Description, Health, HealthKind, RunDetails
from tasks.worker import run_health, server_call
from tasks.worker.heartbeat import LeaseWatch
from tests.support.harness import SETTINGS
from tests.tasks.worker.one_run import FakeRunStore, make_server_call

PENDING = Outcome(OutcomeKind.PENDING)
UNKNOWN = Outcome(OutcomeKind.UNKNOWN)
LOST = Outcome(OutcomeKind.LOST, code="not_found")
DONE = Outcome(OutcomeKind.DONE, result=7)
REFUSED = Outcome(OutcomeKind.PENDING, code="poll_failed")
HEALTHY, BUSY, DOWN = Health(HealthKind.UP), Health(HealthKind.BUSY), Health(HealthKind.DOWN)
CALLBACK: dict[str, Any] = {"mode": "callback", "given_id": "{{job/attempt_id}}"}
GIVEN: dict[str, Any] = {"mode": "async", "given_id": "{{job/attempt_id}}"}


class FakeSession:
    """A session that returns prepared responses in order, repeats the last of each kind, and notes the requests."""

    is_broken, abandoned = False, None

    def __init__(self, description: dict[str, Any], **responses: list[Any]) -> None:
        self.description = Description.model_validate(description)
        self.responses = responses
        self.requests: list[str] = []
        self.calls: list[RunDetails] = []
        self.on_request: Callable[[], None] = lambda: None

    def given_id_of(self, call: RunDetails) -> str | None:
        return call.attempt_id

    async def submit(self, call: RunDetails) -> Any:
        return self._respond("submit", call)

    async def status(self, call: RunDetails, remote_id: str) -> Any:
        return self._respond("status", call)

    async def cancel(self, call: RunDetails, remote_id: str | None = None) -> bool:
        self.requests.append("cancel")
        return True

    async def health(self) -> Any:
        return self._respond("health")

    def cut_off(self) -> None:
        """Do nothing, because no request is in progress."""

    abandon = cut_off

    async def refuses_connections(self) -> bool:
        return False

    def _respond(self, kind: str, call: RunDetails | None = None) -> Any:
        self.requests.append(kind)
        if call is not None:
            self.calls.append(call)
        self.on_request()
        remaining = self.responses[kind]
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]


def _run(**changes: Any) -> Run:
    values: dict[str, Any] = {
        "job": QueuedJob("j", 1, "zimg", 5, "default"),
        "payload": '{"user":"anna"}',
        "attempt": 1,
        "failures": 0,
        "crashes": 0,
        "deadline_ms": None,
        "remote_id": None,
        "sent_ms": None,
        "server": "gpu",
        "slot": "gpu-slot0",
        "started_ms": now_ms(),
        "cancel_requested": False,
    }
    return Run(**values | changes)


def _run_call(
    session: FakeSession,
    run: Run | None = None,
    *,
    owns_run: bool = True,
    max_s: float = 0.3,
    has_one_slot: bool = False,
    store: FakeRunStore | None = None,
) -> tuple[Any, list[str]]:
    """Run a server call, and return its outcome and the stored ids, each with the number of requests before it."""
    stored_ids: list[str] = []

    def store_remote_id(remote_id: str) -> bool:
        stored_ids.append(f"{remote_id} after {len(session.requests)}")
        return owns_run

    async def call() -> Any:
        lease = Lease("zimg", "j", "lease", "owner", "gpu-slot0")
        watch = LeaseWatch(lease, asyncio.get_running_loop().call_soon)
        config = ModelConfig(poll_interval=0.01, max_poll_time=max_s)
        active = ActiveRun(run or _run(), lease)
        run_store = store or FakeRunStore(store_remote_id)
        return await make_server_call(active, watch, config, session, run_store, has_one_slot=has_one_slot).run()

    return asyncio.run(call()), stored_ids


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_call, "_HEALTH_PERIOD_S", 0.01)
    monkeypatch.setattr(run_health, "_DOWN_LIMIT_S", 0.05)


# -- an id that the worker sets --------------------------------------------------------------------------------


@pytest.mark.parametrize("description", [GIVEN, CALLBACK])
def test_a_given_id_is_stored_before_the_request_is_sent(description):
    session = FakeSession(description, submit=[DONE])
    assert _run_call(session) == (DONE, ["j-1 after 0"])


def test_a_given_id_is_deleted_if_the_request_is_not_sent():
    """The next run on that server would request its status, and the response "unknown" would count a crash."""
    stored: list[str | None] = []
    store = FakeRunStore(lambda remote_id: stored.append(remote_id) or True)
    store.is_held = False
    session = FakeSession(GIVEN)
    outcome, _ = _run_call(session, store=store)
    assert (outcome, stored, session.requests) == (StopReason.UNSENT, ["j-1", None], [])


@pytest.mark.parametrize("description", [{}, {"given_id": "{{job/id}}"}, {**GIVEN, "mode": "sync"}])
def test_an_id_that_cannot_be_used_for_polls_is_not_stored(description):
    assert _run_call(FakeSession(description, submit=[DONE])) == (DONE, [])


def test_a_run_that_has_lost_its_lease_sends_no_request():
    session = FakeSession(GIVEN, submit=[DONE])
    assert _run_call(session, owns_run=False)[0] is StopReason.LOST and session.requests == []


def test_an_id_from_the_server_replaces_the_id_that_the_worker_set():
    session = FakeSession(GIVEN, submit=[Outcome(OutcomeKind.PENDING, remote_id="from server")], status=[DONE])
    assert _run_call(session) == (DONE, ["j-1 after 0", "from server after 1"])


def test_a_request_without_a_response_is_polled_by_the_given_id():
    session = FakeSession(GIVEN, submit=[UNKNOWN], status=[PENDING, DONE])
    assert _run_call(session)[0] == DONE and session.requests == ["submit", "status", "status"]


def test_a_request_that_never_reached_the_server_is_sent_again_only_once():
    session = FakeSession(GIVEN, submit=[UNKNOWN], status=[LOST])
    assert _run_call(session)[0] == LOST and session.requests == ["submit", "status", "submit", "status"]


def test_before_a_request_is_sent_again_its_sent_time_is_stored_and_then_the_lease_is_checked():
    """Maintenance ends a run that its server does not know: it seizes the lease first, then reads the sent time."""
    session, store = FakeSession(GIVEN, submit=[UNKNOWN, DONE], status=[LOST]), FakeRunStore()
    assert _run_call(session, store=store)[0] == DONE
    assert store.used == ["lease", "sent time", "lease, read again"]


def test_a_run_that_was_ended_meanwhile_is_not_sent_again():
    session, store = FakeSession(GIVEN, submit=[UNKNOWN], status=[LOST, DONE]), FakeRunStore()
    store.is_over = True
    _run_call(session, store=store)
    assert session.requests.count("submit") == 1


def test_a_run_that_the_server_reported_and_then_lost_is_not_sent_again():
    session = FakeSession(GIVEN, submit=[UNKNOWN], status=[PENDING, LOST])
    assert _run_call(session)[0] == LOST and session.requests == ["submit", "status", "status"]


def test_a_request_whose_server_was_unreachable_meanwhile_is_not_sent_again():
    """The request may have crashed the server."""
    session = FakeSession(GIVEN, submit=[UNKNOWN], status=[REFUSED, LOST])
    assert _run_call(session)[0] == LOST and session.requests == ["submit", "status", "status"]


# -- pushed results --------------------------------------------------------------------------------------------


def _push_description(**callback: Any) -> dict[str, Any]:
    return {**CALLBACK, "callback": callback}


def test_a_server_that_pushes_is_never_polled():
    session = FakeSession(_push_description(), submit=[PENDING], health=[HEALTHY])
    outcome = _run_call(session)[0]
    assert outcome.code == "timed_out" and set(session.requests) == {"submit", "health", "cancel"}


def test_a_resumed_run_waits_for_its_push_and_is_not_sent_again():
    session = FakeSession(_push_description(silent_s=0.05), health=[HEALTHY])
    assert _run_call(session, _run(remote_id="j-1"))[0].code == "server_silent" and set(session.requests) == {"health"}


def test_a_worker_waits_for_the_push_while_the_server_is_busy():
    session = FakeSession(_push_description(silent_s=0.05), submit=[PENDING], health=[BUSY])
    assert _run_call(session)[0].code == "timed_out"


@pytest.mark.parametrize("health", [HEALTHY, Health(HealthKind.UNKNOWN), Health(HealthKind.UP, 0, frozenset(), True)])
def test_a_healthy_server_that_pushes_no_result_has_lost_the_run(health):
    session = FakeSession(_push_description(silent_s=0.05), submit=[PENDING], health=[BUSY, health])
    outcome = _run_call(session, max_s=20)[0]
    assert (outcome.kind, outcome.code) == (OutcomeKind.LOST, "server_silent")


def test_a_worker_waits_for_the_push_while_the_server_lists_the_run():
    health = Health(HealthKind.UP, 1, frozenset({"j-1"}), True)
    session = FakeSession(_push_description(silent_s=0.05), submit=[PENDING], health=[health])
    assert _run_call(session)[0].code == "timed_out"


def test_a_busy_report_restarts_the_count_of_silent_seconds(monkeypatch):
    clock_s = [100.0]
    monkeypatch.setattr(run_health, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    session = FakeSession(
        _push_description(silent_s=10), submit=[PENDING], health=[HEALTHY, BUSY, HEALTHY, HEALTHY, HEALTHY]
    )

    def advance_clock() -> None:
        clock_s[0] += 4

    session.on_request = advance_clock
    assert _run_call(session, max_s=600)[0].code == "server_silent"
    assert session.requests.count("health") == 6, "the silence begins after the busy report"


def test_a_server_that_is_down_has_lost_the_run_but_may_still_run_it():
    session = FakeSession(_push_description(), submit=[PENDING], health=[DOWN])
    outcome = _run_call(session, max_s=20)[0]
    assert (outcome.kind, outcome.code, outcome.server_still_running) == (OutcomeKind.LOST, "server_lost", True)


# -- status requests, and results ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "description, payload",
    [({"status": {"path": "/{{payload/user}}/{{id}}"}}, {"user": "anna"}), ({"submit": {"body": "{{payload}}"}}, None)],
)
def test_the_payload_is_kept_for_status_requests_that_use_it(description, payload):
    session = FakeSession(
        {"mode": "async", **description}, submit=[Outcome(OutcomeKind.PENDING, remote_id="r")], status=[DONE]
    )
    _run_call(session)
    submit, status = session.calls
    assert json_text.dumps(submit.payload) == b'{"user":"anna"}' and status.payload == payload
    assert submit.model == status.model == "zimg"


@pytest.mark.parametrize("keeps", [True, False])
def test_a_slot_is_freed_before_its_result_is_stored_only_if_the_server_keeps_the_result(keeps):
    decision = decide(_run(), DONE, ModelConfig(), SETTINGS, now_ms(), canceling=False, server_keeps_result=keeps)
    assert decision.frees_slot_first is keeps


# -- an idle server --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_one_slot", "code"), [(True, "server_lost"), (False, "timed_out")])
def test_an_idle_server_with_one_slot_has_lost_a_run_without_a_response(has_one_slot, code):
    session = FakeSession({"mode": "sync"}, submit=[UNKNOWN], health=[Health(HealthKind.UP, is_idle=True)])
    assert _run_call(session, _run(crashes=1), has_one_slot=has_one_slot)[0].code == code


# -- responses that are not JSON ---------------------------------------------------------------------------------

FAULTY = Outcome(
    OutcomeKind.PENDING, code="bad_answer", message="the server's answer is not JSON: NaN at 9", is_faulty_json=True
)
PAGE = Outcome(OutcomeKind.PENDING, code="bad_answer", message="the server's answer is not JSON: a page")
LISTS_NONE = Health(HealthKind.UP, active_jobs=0, job_ids=frozenset())


@pytest.mark.parametrize(("health", "is_held"), [(LISTS_NONE, False), (BUSY, True)])
def test_the_same_faulty_status_twice_ends_the_run(health, is_held):
    session = FakeSession({"mode": "async"}, submit=[PENDING._replace(remote_id="r")], status=[FAULTY], health=[health])
    outcome, _ = _run_call(session, max_s=30)
    assert (outcome.kind, outcome.message) == (OutcomeKind.RETRY, FAULTY.message)
    assert session.requests.count("status") == 2 and outcome.server_still_running is is_held


def test_different_faulty_statuses_do_not_end_the_run():
    other_fault = FAULTY._replace(message="NaN at 12")
    statuses = [FAULTY, other_fault, PENDING, other_fault, DONE]
    session = FakeSession({"mode": "async"}, submit=[PENDING._replace(remote_id="r")], status=statuses)
    assert _run_call(session, max_s=30)[0] == DONE


def test_a_poll_that_gets_a_web_page_instead_of_a_status_is_repeated():
    session = FakeSession({"mode": "async"}, submit=[PENDING._replace(remote_id="r")], status=[PAGE, PAGE, PAGE, DONE])
    assert _run_call(session, max_s=30)[0] == DONE


def test_a_faulty_result_that_its_server_does_not_keep_ends_the_run_at_once():
    description = {"mode": "async", "keeps_results": False}
    session = FakeSession(description, submit=[PENDING._replace(remote_id="r")], status=[FAULTY], health=[LISTS_NONE])
    assert _run_call(session, max_s=30)[0].kind is OutcomeKind.RETRY and session.requests.count("status") == 1
