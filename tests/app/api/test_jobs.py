"""Reading jobs, waiting for them, canceling them."""

from typing import Any

import pytest

from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.values import Job, JobError
from tests.support.api import Api
from tests.support.builders import T0, a_job_in, an_ended_job
from tests.support.ends import end_run_with, store_end

UNKNOWN = "01920000-0000-7000-8000-000000000000"


def _get(api: Api, job_id: str, **query: Any) -> Any:
    return api.client.get(f"/queue/jobs/{job_id}", query_string=query)


# -- one job ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(State))
def test_a_job_can_be_read_in_every_state(api: Api, state: State) -> None:
    api.model()
    job = a_job_in(api.dispatcher.store, state, callback_url="https://client.example/hook")
    shown = _get(api, job.id).json
    assert (shown["job_id"], shown["status"], shown["model"]) == (job.id, state, "zimg")
    placed = state is State.RUNNING or state in (State.COMPLETED, State.FAILED, State.EXPIRED, State.CANCELED)
    assert (shown["slot"] is not None) <= (placed or state is State.DEAD)
    assert (shown["result"] is not None) == (state is State.COMPLETED)
    assert (shown["completed_at"] is not None) == (job.finished_ms is not None)


def test_times_are_utc_with_milliseconds(api: Api) -> None:
    job = an_ended_job(api.dispatcher.store, now_ms=T0 + 7)
    assert _get(api, job.id).json["created_at"] == "2027-01-15T08:00:00.007Z"


def test_a_running_job_shows_its_server_and_a_waiting_job_its_position(api: Api) -> None:
    api.register(server="gpu1")
    running, waiting = api.started().run.job.id, api.submitted()
    shown = _get(api, running).json
    assert (shown["status"], shown["server"], shown["slot"]) == ("running", "gpu1", "gpu1-slot0")
    assert (shown["position"], shown["attempts"]) == (None, 1)
    shown = _get(api, waiting).json
    assert (shown["server"], shown["slot"], shown["position"]) == (None, None, 1)


def test_a_result_is_returned_as_it_was_stored(api: Api) -> None:
    api.register()
    task = api.started()
    end_run_with(api.dispatcher, task, Reason.FINISHED, result='{"url":"x","n":[1,2.5,null]}')
    assert _get(api, task.run.job.id).json["result"] == {"url": "x", "n": [1, 2.5, None]}


def _dead(api: Api, why: Reason) -> Job:
    api.register()
    task = api.started()
    error = JobError("server_error", "out of memory")
    store_end(api.dispatcher.store, task.run.job.id, task.run.attempt, why, T0, error=error)
    return api.job(task.run.job.id)


@pytest.mark.parametrize(
    "why, code",
    [(Reason.RETRIES_EXHAUSTED, "max_retries_exceeded"), (Reason.CRASHES_EXHAUSTED, "max_crashes_exceeded")],
)
def test_a_dead_job_shows_its_reason_as_an_error_code_of_the_api(api: Api, why: Reason, code: str) -> None:
    shown = _get(api, _dead(api, why).id).json
    assert shown["status"] == "dead"
    assert shown["error"] == {"code": code, "message": "out of memory", "last_code": "server_error"}


def test_a_job_that_is_retried_shows_a_last_error_and_no_error(api: Api) -> None:
    api.register()
    task = api.started()
    error = JobError("server_error", "out of memory")
    end_run_with(api.dispatcher, task, Reason.SERVER_ERROR, error=error)
    shown = _get(api, task.run.job.id).json
    assert (shown["status"], shown["error"], shown["last_error"]["code"]) == ("delayed", None, "server_error")


@pytest.mark.parametrize("job_id", [UNKNOWN, "x", "a%0ab", "%ed%a0%80", "x" * 3000])
@pytest.mark.parametrize("what", ["", "/attempts", "/cancel"])
def test_an_unknown_job_is_not_found(api: Api, job_id: str, what: str) -> None:
    act = api.client.post if what == "/cancel" else api.client.get
    answer = act(f"/queue/jobs/{job_id}{what}")
    assert (answer.status_code, answer.json["code"]) == (404, "job_not_found")


def test_a_job_can_be_read_without_redis(mortal_api: Api) -> None:
    mortal_api.model()
    job_id = mortal_api.submitted()
    mortal_api.valkey.kill()
    assert _get(mortal_api, job_id).json["position"] is None


def test_attempts_lists_the_start_and_the_outcome_of_each_run(api: Api) -> None:
    api.register()
    task = api.started()
    end_run_with(api.dispatcher, task, Reason.SERVER_ERROR, error=JobError("server_error", "out of memory"))
    (attempt,) = api.client.get(f"/queue/jobs/{task.run.job.id}/attempts").json["attempts"]
    assert (attempt["attempt"], attempt["server"], attempt["outcome"]) == (1, "gpu1", "server_error")
    assert attempt["error"]["message"] == "out of memory"


# -- waiting ---------------------------------------------------------------------------------------------------


def test_a_job_that_has_ended_is_not_waited_for(api: Api) -> None:
    job = an_ended_job(api.dispatcher.store)
    assert _get(api, job.id, wait=60).json["status"] == "completed"


def test_another_server_than_web_ignores_the_wait_parameter(api: Api) -> None:
    api.model()
    assert _get(api, api.submitted(), wait=60).json["status"] == "queued"


@pytest.mark.parametrize("wait", [-1, 61, "long", "nan", "inf"])
def test_wait_is_0_to_60_seconds(api: Api, wait: Any) -> None:
    answer = _get(api, UNKNOWN, wait=wait)
    assert (answer.status_code, answer.json["field"]) == (422, "wait")


# -- lists -----------------------------------------------------------------------------------------------------


def test_a_paged_list_misses_no_job_and_omits_newer_ones(api: Api) -> None:
    api.model()
    ids = [api.submitted() for _ in range(7)]
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 3}
    while True:
        page = api.client.get("/queue/jobs", query_string=query).json
        seen += [job["job_id"] for job in page["jobs"]]
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
        api.submitted()  # a new job between two pages
    assert seen == ids[::-1]


def test_a_list_is_limited_by_state_and_model(api: Api) -> None:
    api.model("zimg")
    api.model("flux.1/dev")
    wanted = api.submitted(model="flux.1/dev")
    api.submitted()
    api.dispatcher.cancel(api.submitted(model="flux.1/dev"))
    page = api.client.get("/queue/jobs?status=queued&model=flux.1/dev").json
    assert [job["job_id"] for job in page["jobs"]] == [wanted]


@pytest.mark.parametrize(
    "query, field",
    [
        ("status=lost", "status"),
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=x", "limit"),
        ("cursor=x", "cursor"),
        ("cursor=c2VxOjA%3D", "cursor"),
        ("cursor=c2VxOjk5OTk5OTk5OTk5OTk5OTk5OTk5OTk%3D", "cursor"),
        ("cursor=%C3%BC", "cursor"),
        ("model=%00", "model"),
        ("stauts=queued", "stauts"),
    ],
)
def test_a_wrong_filter_is_named(api: Api, query: str, field: str) -> None:
    answer = api.client.get(f"/queue/jobs?{query}")
    assert (answer.status_code, answer.json["field"]) == (422, field)


# -- cancel ----------------------------------------------------------------------------------------------------


def test_a_waiting_job_is_canceled_at_once(api: Api) -> None:
    api.model()
    job_id = api.submitted()
    answer = api.client.post(f"/queue/jobs/{job_id}/cancel")
    assert (answer.status_code, answer.json["status"]) == (200, "canceled")
    assert api.job(job_id).state is State.CANCELED


def test_a_running_job_stays_running_after_a_cancel_until_its_server_ends_it(api: Api) -> None:
    api.register()
    job_id = api.started().run.job.id
    answer = api.client.post(f"/queue/jobs/{job_id}/cancel")
    assert (answer.status_code, answer.json["status"]) == (202, "canceling")
    shown = _get(api, job_id).json
    assert (shown["status"], shown["cancel_requested"]) == ("running", True)


def test_an_ended_job_cannot_be_canceled(api: Api) -> None:
    job = an_ended_job(api.dispatcher.store)
    answer = api.client.post(f"/queue/jobs/{job.id}/cancel")
    assert (answer.status_code, answer.json["code"], answer.json["job_status"]) == (409, "conflict", "completed")
    assert api.job(job.id) == job


def test_a_waiting_job_can_be_canceled_while_redis_is_down(mortal_api: Api) -> None:
    mortal_api.model()
    job_id = mortal_api.submitted()
    mortal_api.valkey.kill()
    assert mortal_api.client.post(f"/queue/jobs/{job_id}/cancel").status_code == 200
