"""A run at a server that speaks in its own way: what its worker makes of what is said, and of silence."""

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
from tasks.servers import Call, Description, Health, HealthKind
from tasks.worker import run_health, server_call
from tasks.worker.heartbeat import LeaseWatch
from tests.support.stage import SETTINGS
from tests.tasks.worker.one_run import FakeRunStore, make_server_call

PENDING = Outcome(OutcomeKind.PENDING)
UNKNOWN = Outcome(OutcomeKind.UNKNOWN)
LOST = Outcome(OutcomeKind.LOST, code="not_found")
DONE = Outcome(OutcomeKind.DONE, result=7)
REFUSED = Outcome(OutcomeKind.PENDING, code="poll_failed")
WELL, BUSY, DOWN = Health(HealthKind.UP), Health(HealthKind.BUSY), Health(HealthKind.DOWN)
CALLBACK: dict[str, Any] = {"mode": "callback", "given_id": "{{job/attempt_id}}"}
GIVEN: dict[str, Any] = {"mode": "async", "given_id": "{{job/attempt_id}}"}


class Live:
    """Gives its answers one after another, the last again and again; notes what it is asked."""

    is_broken, abandoned = False, None

    def __init__(self, description: dict[str, Any], **answers: list[Any]) -> None:
        self.description = Description.model_validate(description)
        self.answers = answers
        self.asked: list[str] = []
        self.calls: list[Call] = []
        self.then: Callable[[], None] = lambda: None

    def given_id_of(self, call: Call) -> str | None:
        return call.attempt_id

    async def submit(self, call: Call) -> Any:
        return self._said("submit", call)

    async def status(self, call: Call, remote_id: str) -> Any:
        return self._said("status", call)

    async def cancel(self, call: Call, remote_id: str | None = None) -> bool:
        self.asked.append("cancel")
        return True

    async def health(self) -> Any:
        return self._said("health")

    def cut_off(self) -> None:
        """Nothing is under way."""

    abandon = cut_off

    async def refuses_connections(self) -> bool:
        return False

    def _said(self, what: str, call: Call | None = None) -> Any:
        self.asked.append(what)
        if call is not None:
            self.calls.append(call)
        self.then()
        left = self.answers[what]
        return left.pop(0) if len(left) > 1 else left[0]


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


def _watch(
    live: Live,
    run: Run | None = None,
    *,
    still_ours: bool = True,
    max_s: float = 0.3,
    has_one_slot: bool = False,
    store: FakeRunStore | None = None,
) -> tuple[Any, list[str]]:
    """What came of the run, and the ids that went into the record, each with what had been asked before it."""
    noted: list[str] = []

    def note(remote_id: str) -> bool:
        noted.append(f"{remote_id} after {len(live.asked)}")
        return still_ours

    async def whole() -> Any:
        lease = Lease("zimg", "j", "lease", "owner", "gpu-slot0")
        watch = LeaseWatch(lease, asyncio.get_running_loop().call_soon)
        config = ModelConfig(poll_interval=0.01, max_poll_time=max_s)
        active = ActiveRun(run or _run(), lease)
        stored = store or FakeRunStore(note)
        return await make_server_call(active, watch, config, live, stored, has_one_slot=has_one_slot).run()

    return asyncio.run(whole()), noted


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_call, "_HEALTH_PERIOD_S", 0.01)
    monkeypatch.setattr(run_health, "_DOWN_LIMIT_S", 0.05)


# -- an id of ours ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("description", [GIVEN, CALLBACK])
def test_an_id_that_we_give_is_in_the_record_before_the_request_is_sent(description):
    live = Live(description, submit=[DONE])
    assert _watch(live) == (DONE, ["j-1 after 0"])


@pytest.mark.parametrize("description", [{}, {"given_id": "{{job/id}}"}, {**GIVEN, "mode": "sync"}])
def test_a_server_that_cannot_be_asked_by_it_needs_no_note(description):
    assert _watch(Live(description, submit=[DONE])) == (DONE, [])


def test_a_run_that_is_over_is_not_sent():
    live = Live(GIVEN, submit=[DONE])
    assert _watch(live, still_ours=False)[0] is StopReason.LOST and live.asked == []


def test_an_id_that_the_server_gives_itself_takes_the_place_of_ours():
    live = Live(GIVEN, submit=[Outcome(OutcomeKind.PENDING, remote_id="its own")], status=[DONE])
    assert _watch(live) == (DONE, ["j-1 after 0", "its own after 1"])


def test_a_request_without_an_answer_is_asked_for_by_our_id():
    live = Live(GIVEN, submit=[UNKNOWN], status=[PENDING, DONE])
    assert _watch(live)[0] == DONE and live.asked == ["submit", "status", "status"]


def test_a_request_that_never_came_there_is_sent_once_more_and_not_twice():
    live = Live(GIVEN, submit=[UNKNOWN], status=[LOST])
    assert _watch(live)[0] == LOST and live.asked == ["submit", "status", "submit", "status"]


def test_before_a_request_is_sent_again_its_sent_time_is_stored_and_then_the_lease_is_checked():
    """Maintenance, which ends runs that their servers do not have, seizes the lease and then reads the sent time."""
    live, store = Live(GIVEN, submit=[UNKNOWN, DONE], status=[LOST]), FakeRunStore()
    assert _watch(live, store=store)[0] == DONE
    assert store.used == ["lease", "sent time", "lease, asked now"]


def test_a_run_that_was_ended_meanwhile_is_not_sent_again():
    live, store = Live(GIVEN, submit=[UNKNOWN], status=[LOST, DONE]), FakeRunStore()
    store.is_over = True
    _watch(live, store=store)
    assert live.asked.count("submit") == 1


def test_a_run_that_the_server_knew_and_forgot_is_not_sent_again():
    live = Live(GIVEN, submit=[UNKNOWN], status=[PENDING, LOST])
    assert _watch(live)[0] == LOST and live.asked == ["submit", "status", "status"]


def test_a_request_whose_server_could_not_be_asked_meanwhile_is_not_sent_again():
    """It may have brought it down."""
    live = Live(GIVEN, submit=[UNKNOWN], status=[REFUSED, LOST])
    assert _watch(live)[0] == LOST and live.asked == ["submit", "status", "status"]


# -- pushes ----------------------------------------------------------------------------------------------------


def _silent(**callback: Any) -> dict[str, Any]:
    return {**CALLBACK, "callback": callback}


def test_a_server_that_pushes_is_never_polled():
    live = Live(_silent(), submit=[PENDING], health=[WELL])
    outcome = _watch(live)[0]
    assert outcome.code == "timed_out" and set(live.asked) == {"submit", "health", "cancel"}


def test_a_resumed_run_waits_for_its_push_and_is_not_sent_again():
    live = Live(_silent(silent_s=0.05), health=[WELL])
    assert _watch(live, _run(remote_id="j-1"))[0].code == "server_silent" and set(live.asked) == {"health"}


def test_a_push_is_waited_for_while_the_server_is_busy():
    live = Live(_silent(silent_s=0.05), submit=[PENDING], health=[BUSY])
    assert _watch(live)[0].code == "timed_out"


@pytest.mark.parametrize("health", [WELL, Health(HealthKind.UNKNOWN), Health(HealthKind.UP, 0, frozenset(), True)])
def test_a_server_that_is_well_and_silent_has_lost_the_run(health):
    live = Live(_silent(silent_s=0.05), submit=[PENDING], health=[BUSY, health])
    outcome = _watch(live, max_s=20)[0]
    assert (outcome.kind, outcome.code) == (OutcomeKind.LOST, "server_silent")


def test_a_push_is_waited_for_while_the_server_lists_the_run():
    health = Health(HealthKind.UP, 1, frozenset({"j-1"}), True)
    live = Live(_silent(silent_s=0.05), submit=[PENDING], health=[health])
    assert _watch(live)[0].code == "timed_out"


def test_silence_is_counted_anew_after_the_server_was_busy(monkeypatch):
    at = [100.0]
    monkeypatch.setattr(run_health, "time", SimpleNamespace(monotonic=lambda: at[0]))
    live = Live(_silent(silent_s=10), submit=[PENDING], health=[WELL, BUSY, WELL, WELL, WELL])

    def four_seconds() -> None:
        at[0] += 4

    live.then = four_seconds
    assert _watch(live, max_s=600)[0].code == "server_silent"
    assert live.asked.count("health") == 6, "the first second of silence is that after it was busy"


def test_a_server_that_is_gone_has_lost_the_run_and_may_be_at_it():
    live = Live(_silent(), submit=[PENDING], health=[DOWN])
    outcome = _watch(live, max_s=20)[0]
    assert (outcome.kind, outcome.code, outcome.server_still_running) == (OutcomeKind.LOST, "server_lost", True)


# -- questions, and results ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "description, payload",
    [({"status": {"path": "/{{payload/user}}/{{id}}"}}, {"user": "anna"}), ({"submit": {"body": "{{payload}}"}}, None)],
)
def test_the_payload_is_kept_for_questions_that_need_it(description, payload):
    live = Live({"mode": "async", **description}, submit=[Outcome(OutcomeKind.PENDING, remote_id="r")], status=[DONE])
    _watch(live)
    submit, status = live.calls
    assert json_text.dumps(submit.payload) == b'{"user":"anna"}' and status.payload == payload
    assert submit.model == status.model == "zimg"


@pytest.mark.parametrize("keeps", [True, False])
def test_a_result_that_its_server_has_no_more_is_stored_before_the_slot_goes_on(keeps):
    decision = decide(_run(), DONE, ModelConfig(), SETTINGS, now_ms(), canceling=False, server_keeps_result=keeps)
    assert decision.frees_slot_first is keeps


# -- a server that has a free place ----------------------------------------------------------------------------


@pytest.mark.parametrize(("has_one_slot", "code"), [(True, "server_lost"), (False, "timed_out")])
def test_an_idle_server_does_not_know_an_unanswered_run_if_it_has_one_slot(has_one_slot, code):
    live = Live({"mode": "sync"}, submit=[UNKNOWN], health=[Health(HealthKind.UP, is_idle=True)])
    assert _watch(live, _run(crashes=1), has_one_slot=has_one_slot)[0].code == code


# -- answers that cannot be read ---------------------------------------------------------------------------------

FAULTY = Outcome(
    OutcomeKind.PENDING, code="bad_answer", message="the server's answer is not JSON: NaN at 9", is_faulty_json=True
)
PAGE = Outcome(OutcomeKind.PENDING, code="bad_answer", message="the server's answer is not JSON: a page")
LISTS_NONE = Health(HealthKind.UP, active_jobs=0, job_ids=frozenset())


@pytest.mark.parametrize(("health", "is_held"), [(LISTS_NONE, False), (BUSY, True)])
def test_the_same_faulty_status_twice_ends_the_run(health, is_held):
    live = Live({"mode": "async"}, submit=[PENDING._replace(remote_id="r")], status=[FAULTY], health=[health])
    outcome, _ = _watch(live, max_s=30)
    assert (outcome.kind, outcome.message) == (OutcomeKind.RETRY, FAULTY.message)
    assert live.asked.count("status") == 2 and outcome.server_still_running is is_held


def test_a_faulty_status_that_heals_does_not_end_the_run():
    other = FAULTY._replace(message="NaN at 12")
    statuses = [FAULTY, other, PENDING, other, DONE]
    live = Live({"mode": "async"}, submit=[PENDING._replace(remote_id="r")], status=statuses)
    assert _watch(live, max_s=30)[0] == DONE


def test_a_page_in_place_of_a_status_is_asked_again():
    live = Live({"mode": "async"}, submit=[PENDING._replace(remote_id="r")], status=[PAGE, PAGE, PAGE, DONE])
    assert _watch(live, max_s=30)[0] == DONE


def test_a_faulty_result_that_its_server_does_not_keep_ends_the_run_at_once():
    described = {"mode": "async", "keeps_results": False}
    live = Live(described, submit=[PENDING._replace(remote_id="r")], status=[FAULTY], health=[LISTS_NONE])
    assert _watch(live, max_s=30)[0].kind is OutcomeKind.RETRY and live.asked.count("status") == 1
