"""POST /tasks/callback/{id}: only the server that runs a job can end its run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from routing.dispatch.dispatcher import ActiveRun
from slotkeeper import json_text, large_json
from slotkeeper.clock import now_ms
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.values import JobError, Run
from slotkeeper.registry.tenants import Tenants
from tasks import server_push
from tests.support.api import Api
from tests.support.ends import end_run_with, store_end
from tools.cluster.direct_starts import store_remote_id, store_start

DONE = {"status": "success", "result": {"url": "https://cdn.example/1.png"}}
UNKNOWN = "01920000-0000-7000-8000-000000000000"


@pytest.fixture
def task(api: Api) -> ActiveRun:
    """A job that runs on gpu1."""
    api.register(slots=1)
    return api.started()


def _push(api: Api, job_id: str, token: str, body: Any = DONE, **more: Any) -> Any:
    header = {"Authorization": f"Bearer {token}"}
    return api.client.post(f"/tasks/callback/{job_id}", json=body, headers=header, **more)


def _token(task: ActiveRun) -> str:
    return server_push.push_token(task.run.job.id, task.run.attempt)


def test_a_push_ends_the_run_and_offers_the_slot_to_the_next_job(api: Api, task: ActiveRun) -> None:
    waiting = api.submitted()
    answer = _push(api, task.run.job.id, _token(task))
    job = api.job(task.run.job.id)
    assert (answer.status_code, answer.json["status"]) == (200, "completed")
    assert (job.state, job.result) == (State.COMPLETED, '{"url":"https://cdn.example/1.png"}')
    assert api.notifications.offers[-1].job_id == waiting


def test_the_token_is_accepted_in_its_own_header(api: Api, task: ActiveRun) -> None:
    header = {"X-Callback-Token": _token(task)}
    answer = api.client.post(f"/tasks/callback/{task.run.job.id}", json=DONE, headers=header)
    assert answer.json["status"] == "completed"


def test_the_same_push_again_changes_nothing(api: Api, task: ActiveRun) -> None:
    first = _push(api, task.run.job.id, _token(task))
    after = api.job(task.run.job.id)
    again = _push(api, task.run.job.id, _token(task))
    other = _push(api, task.run.job.id, _token(task), {"status": "failed", "error": "no"})
    assert first.json == again.json == other.json
    assert (again.status_code, other.status_code) == (200, 200)
    assert api.job(task.run.job.id) == after
    assert len(api.notifications.ends) == 1


def test_a_push_without_a_final_status_is_ignored(api: Api, task: ActiveRun) -> None:
    before = api.job(task.run.job.id)
    for body in ({"status": "processing", "job_id": "r-1"}, {"progress": 0.5}, [], "done", None):
        answer = _push(api, task.run.job.id, _token(task), body)
        assert (answer.status_code, answer.json["status"]) == (202, "ignored"), body
    assert api.job(task.run.job.id) == before


def test_a_pushed_failure_costs_a_retry_like_a_polled_failure(api: Api, task: ActiveRun) -> None:
    answer = _push(api, task.run.job.id, _token(task), {"status": "failed", "error": "out of memory"})
    job = api.job(task.run.job.id)
    assert (answer.json["status"], job.state, job.failures) == ("delayed", State.DELAYED, 1)
    assert "out of memory" in (job.error_message or "")


def test_a_pushed_result_that_is_larger_than_its_tenant_may_have_fails_the_job(api: Api, task: ActiveRun) -> None:
    Tenants(api.database).change("default", {"max_result_bytes": 5}, now_ms())
    api.dispatcher.catalog.refresh()
    _push(api, task.run.job.id, _token(task), DONE)
    assert api.job(task.run.job.id).error_code == "result_too_large"


def test_a_pushed_failure_is_notified_once(api: Api) -> None:
    api.model(max_retries=0)
    api.register()
    task = api.started()
    _push(api, task.run.job.id, _token(task), {"status": "failed", "error": "out of memory"})
    assert api.job(task.run.job.id).state is State.DEAD
    assert [moved.to for moved in api.notifications.ends] == [State.DEAD]


def test_a_push_from_a_removed_server_is_ignored(api: Api, task: ActiveRun) -> None:
    assert api.client.delete("/admin/servers/gpu1?force=true").status_code == 200
    assert _push(api, task.run.job.id, _token(task)).json == {"status": "queued"}
    assert api.job(task.run.job.id).state is State.QUEUED


def test_a_push_gets_503_while_the_database_is_down_and_succeeds_later(api: Api, task: ActiveRun) -> None:
    api.take_database_away()
    answer = _push(api, task.run.job.id, _token(task))
    api.bring_database_back()
    assert answer.status_code == 503
    assert _push(api, task.run.job.id, _token(task)).json["status"] == "completed"


@pytest.mark.parametrize("settings", [{"MAX_PUSH_BYTES": "1000"}])
def test_a_result_that_is_too_large_is_refused(api: Api, settings: dict[str, str], task: ActiveRun) -> None:
    answer = _push(api, task.run.job.id, _token(task), {"status": "success", "result": {"a": "x" * 1000}})
    assert answer.status_code == 413
    assert api.job(task.run.job.id).state is State.RUNNING


@pytest.mark.parametrize("levels", [201, 254, 300, 1000])
def test_a_result_that_is_nested_too_deep_fails_the_job(api: Api, task: ActiveRun, levels: int) -> None:
    nested = "[" * levels + "]" * levels
    answer = api.client.post(
        f"/tasks/callback/{task.run.job.id}",
        data=f'{{"status": "success", "result": {nested}}}',
        headers={"Authorization": f"Bearer {_token(task)}"},
    )
    job = api.job(task.run.job.id)
    assert (answer.status_code, answer.json["code"]) == (422, "answer_too_deep")
    assert (job.state, job.why, job.error_code) == (State.FAILED, Reason.INVALID_REQUEST, "answer_too_deep")


@pytest.mark.parametrize(("mode", "state", "slots_held"), [("async", State.RUNNING, 0), ("callback", State.DELAYED, 1)])
def test_an_invalid_push_is_refused_and_ends_a_run_that_is_not_polled(
    api: Api, mode: str, state: State, slots_held: int
) -> None:
    api.model(description={"mode": mode})
    api.register(slots=1)
    task = api.started()
    pushed = {"data": '{"status": "success", "result": NaN}', "headers": {"Authorization": f"Bearer {_token(task)}"}}
    refused = api.client.post(f"/tasks/callback/{task.run.job.id}", **pushed)
    again = api.client.post(f"/tasks/callback/{task.run.job.id}", **pushed)
    job = api.job(task.run.job.id)
    assert (refused.status_code, refused.json["code"], job.state) == (422, "bad_answer", state)
    assert "NaN at character 33" in refused.json["detail"]
    assert again.status_code == (422 if state is State.RUNNING else 200)
    assert len(quarantine.list_all(api.database)) == slots_held


def test_a_result_of_the_greatest_depth_is_kept_and_shown(api: Api, task: ActiveRun) -> None:
    result: Any = 1
    for _ in range(200):
        result = {"a": result}
    assert _push(api, task.run.job.id, _token(task), {"status": "success", "result": result}).status_code == 200
    assert api.client.get(f"/queue/jobs/{task.run.job.id}").json["result"] == result


# -- forgeries -------------------------------------------------------------------------------------------------

FORGERIES: dict[str, Callable[[ActiveRun], str]] = {
    "none": lambda task: "",
    "a guess": lambda task: "0" * 64,
    "no ASCII": lambda task: "\xfc",
    "of another job": lambda task: server_push.push_token(UNKNOWN, task.run.attempt),
    "of the attempt before": lambda task: server_push.push_token(task.run.job.id, task.run.attempt - 1),
    "of the next attempt": lambda task: server_push.push_token(task.run.job.id, task.run.attempt + 1),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_push_changes_nothing(api: Api, task: ActiveRun, forgery: str) -> None:
    before = api.job(task.run.job.id)
    answer = _push(api, task.run.job.id, FORGERIES[forgery](task))
    assert answer.status_code == 403
    assert api.job(task.run.job.id) == before


def test_a_push_with_an_invalid_token_reads_no_events(
    api: Api, task: ActiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = _taken_up(api, task, Reason.HANDED_BACK)
    monkeypatch.setattr(api.dispatcher.store, "list_events", lambda _: pytest.fail("they were read"))
    assert _push(api, again.job.id, "0" * 64).status_code == 403


def test_an_invalid_token_is_compared_once_regardless_of_the_number_of_attempts(
    api: Api, task: ActiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    monkeypatch.setattr(server_push, "is_valid_token", lambda shown, job_id, attempt: compared.append(attempt))
    assert not server_push.is_token_of_run(replace(api.job(task.run.job.id), attempt=5_000), "0" * 64)
    assert compared == [5_000]


def test_a_push_with_a_wrong_token_gets_the_same_answer_for_known_and_unknown_jobs(api: Api, task: ActiveRun) -> None:
    known = _push(api, task.run.job.id, "0" * 64).json
    unknown = _push(api, UNKNOWN, "0" * 64).json
    assert known | {"instance": ""} == unknown | {"instance": ""}


def test_a_superseded_attempt_cannot_end_the_next(api: Api, task: ActiveRun) -> None:
    """LEASE-3, checked through the REST API."""
    old = _token(task)
    store_end(api.dispatcher.store, task.run.job.id, task.run.attempt, Reason.HANDED_BACK, 0)
    again = store_start(api.dispatcher.store, task.run.job.id, "gpu1", "gpu1-slot0", task.lease.stored_text, 1)
    assert again is not None
    assert _push(api, task.run.job.id, old).status_code == 403
    assert api.job(task.run.job.id).state is State.RUNNING
    assert _push(api, task.run.job.id, server_push.push_token(again.job.id, again.attempt)).status_code == 200


def _taken_up(api: Api, task: ActiveRun, why: Reason, server: str = "gpu1") -> Run:
    """Its server has taken it up, and its worker is gone; the next one has begun."""
    store, run = api.dispatcher.store, task.run
    assert store_remote_id(store, run.job.id, run.attempt, "r-1", run.started_ms + 5)
    store_end(store, run.job.id, run.attempt, why, run.started_ms + 10)
    again = store_start(store, run.job.id, server, f"{server}-slot0", task.lease.stored_text, run.started_ms + 20)
    assert again is not None
    return again


def test_a_resumed_run_accepts_the_token_that_its_server_received(api: Api, task: ActiveRun) -> None:
    old = _token(task)
    again = _taken_up(api, task, Reason.LEASE_EXPIRED)
    assert (again.attempt, again.remote_id) == (2, "r-1")
    assert _push(api, task.run.job.id, server_push.push_token(task.run.job.id, 3)).status_code == 403
    assert _push(api, task.run.job.id, old).json == {"status": "completed"}
    assert api.job(task.run.job.id).result == '{"url":"https://cdn.example/1.png"}'


def test_a_run_that_was_resumed_twice_ends_under_its_first_token(api: Api, task: ActiveRun) -> None:
    old, store, job_id = _token(task), api.dispatcher.store, task.run.job.id
    again = _taken_up(api, task, Reason.HANDED_BACK)
    store_end(store, job_id, again.attempt, Reason.LEASE_EXPIRED, again.started_ms + 10)
    assert store_start(store, job_id, "gpu1", "gpu1-slot0", task.lease.stored_text, again.started_ms + 20) is not None
    assert _push(api, job_id, server_push.push_token(job_id, 2)).status_code == 403, "nothing was sent under it"
    assert _push(api, job_id, old).json == {"status": "completed"}


@pytest.mark.parametrize(
    ("why", "server", "sent"),
    [(Reason.SERVER_LOST, "gpu1", False), (Reason.LEASE_EXPIRED, "gpu2", False), (Reason.SERVER_LOST, "gpu1", True)],
)
def test_a_new_run_accepts_only_its_own_token(api: Api, task: ActiveRun, why: Reason, server: str, sent: bool) -> None:
    old, job_id = _token(task), task.run.job.id
    again = _taken_up(api, task, why, server)
    if sent:
        assert store_remote_id(api.dispatcher.store, job_id, again.attempt, "r-2", again.started_ms + 5)
    assert _push(api, job_id, old).status_code == 403
    assert api.job(job_id).state is State.RUNNING


def test_a_push_while_no_worker_owns_the_job_gets_503_and_can_be_repeated(api: Api, task: ActiveRun) -> None:
    store, run = api.dispatcher.store, task.run
    assert store_remote_id(store, run.job.id, run.attempt, "r-1", run.started_ms + 5)
    store_end(store, run.job.id, run.attempt, Reason.LEASE_EXPIRED, run.started_ms + 10)
    answer = _push(api, run.job.id, _token(task))
    assert (answer.status_code, answer.json["code"]) == (503, "between_workers")
    assert store_start(store, run.job.id, "gpu1", "gpu1-slot0", task.lease.stored_text, run.started_ms + 20) is not None
    assert _push(api, run.job.id, _token(task)).json == {"status": "completed"}


def test_a_push_for_a_job_that_waits_again_changes_nothing(api: Api, task: ActiveRun) -> None:
    end_run_with(api.dispatcher, task, Reason.SERVER_BUSY, error=JobError("busy", "busy"))
    before = api.job(task.run.job.id)
    answer = _push(api, task.run.job.id, _token(task))
    assert (answer.status_code, answer.json["status"]) == (200, "queued")
    assert api.job(task.run.job.id) == before


# -- each guard is needed --------------------------------------------------------------------------------------


def test_without_the_token_guard_a_forgery_would_get_through(
    api: Api, task: ActiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_push, "is_valid_token", lambda *_: True)
    assert _push(api, task.run.job.id, "0" * 64).status_code == 200
    assert api.job(task.run.job.id).state is State.COMPLETED


def test_a_push_of_an_earlier_attempt_writes_nothing_after_the_next_start(api: Api, task: ActiveRun) -> None:
    """The push was checked before the next attempt began, and is applied after it (LEASE-3)."""
    seen = api.job(task.run.job.id)
    outcome = server_push.read_push(seen, b'{"status":"success","result":{}}')
    assert outcome is not None
    store_end(api.dispatcher.store, task.run.job.id, task.run.attempt, Reason.HANDED_BACK, 0)
    assert (
        store_start(api.dispatcher.store, task.run.job.id, "gpu1", "gpu1-slot0", task.lease.stored_text, 1) is not None
    )
    before = api.job(task.run.job.id)
    assert not server_push.apply_push(seen, outcome)
    assert api.job(task.run.job.id) == before


def test_without_the_token_in_the_attempt_an_old_one_would_get_through(
    api: Api, task: ActiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = server_push._token
    monkeypatch.setattr(server_push, "_token", lambda key, job_id, attempt: real(key, job_id, 0))
    old = _token(task)
    store_end(api.dispatcher.store, task.run.job.id, task.run.attempt, Reason.HANDED_BACK, 0)
    assert (
        store_start(api.dispatcher.store, task.run.job.id, "gpu1", "gpu1-slot0", task.lease.stored_text, 1) is not None
    )
    assert _push(api, task.run.job.id, old).status_code == 200
    assert api.job(task.run.job.id).state is State.COMPLETED


@pytest.mark.parametrize("digits", [str(2**64), str(2**70), "7" * 4300])
def test_an_integer_of_up_to_4300_digits_is_stored_exactly_in_the_result(
    api: Api, task: ActiveRun, digits: str
) -> None:
    result = f'{{"n":{digits}}}'
    body = f'{{"status":"success","result":{result}}}'
    header = {"Authorization": f"Bearer {_token(task)}"}
    job_id = task.run.job.id
    answer = api.client.post(f"/tasks/callback/{job_id}", data=body, content_type="application/json", headers=header)
    assert answer.json["status"] == "completed"
    assert api.job(job_id).result == result
    assert f'"result":{result}' in api.client.get(f"/queue/jobs/{job_id}").text


def test_a_push_that_names_another_job_is_ignored(api: Api, task: ActiveRun) -> None:
    other = api.submitted()
    answer = _push(api, task.run.job.id, _token(task), {"job_id": other} | DONE)
    assert (answer.status_code, answer.json["status"]) == (202, "ignored")
    assert api.job(task.run.job.id).state is State.RUNNING
    for own in (task.run.job.id, "what-the-server-calls-it"):
        assert _push(api, task.run.job.id, _token(task), {"job_id": own} | DONE).json["status"] == "completed"


def test_a_large_push_is_not_made_into_objects(api: Api, task: ActiveRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    loads = json_text.loads
    monkeypatch.setattr(json_text, "loads", lambda text: made.append(len(text)) or loads(text))
    result = "[" + "[]," * 200_000 + "[]]"
    body = f'{{"job_id":"{task.run.job.id}","status":"success","result":{result}}}'
    header = {"Authorization": f"Bearer {_token(task)}"}
    answer = api.client.post(
        f"/tasks/callback/{task.run.job.id}", data=body, content_type="application/json", headers=header
    )
    assert answer.json["status"] == "completed"
    assert api.job(task.run.job.id).result == result
    assert max(made, default=0) <= large_json.LARGE_BYTES


def test_a_push_for_a_canceled_run_releases_its_quarantined_slot(api: Api, task: ActiveRun) -> None:
    job_id, waiting = task.run.job.id, api.submitted()
    end_run_with(api.dispatcher, task, Reason.CANCEL_REQUESTED, server_still_running="canceled")
    assert api.job(job_id).state is State.CANCELED
    assert _push(api, job_id, _token(task), {"status": "processing"}).json["status"] == "canceled"
    assert quarantine.find(api.database, job_id, task.run.attempt) is not None, "the server still runs the job"
    assert _push(api, job_id, _token(task)).json["status"] == "canceled"
    assert quarantine.find(api.database, job_id, task.run.attempt) is None
    assert api.notifications.offers[-1].job_id == waiting
