"""GET /queue/jobs/{id}/explain: the reasons why a job waits, each tested alone."""

from typing import Any

import pytest

from slotkeeper.jobs.states import END_SENTENCES, Reason, State
from tests.support import passes
from tests.support.api import Api, TimedApi
from tests.support.builders import T0, a_job_in, a_queued_job, a_running_job
from tests.support.ends import cool_down, store_end

SECOND = 1000


def _codes(found: dict[str, Any]) -> list[str]:
    return [one["code"] for one in found["waits_for"]]


def _stop(api: Api, path: str, state: str = "paused", reason: str = "new driver") -> None:
    assert api.client.patch(f"/admin/{path}", json={"state": state, "reason": reason}).status_code == 200


def _measured(api: TimedApi, slots: int = 1, runs: int = 3) -> None:
    """A model whose runs take a minute."""
    api.register(slots=slots)
    for _ in range(runs):
        api.submitted()
        api.run(60 * SECOND)


# -- in line -------------------------------------------------------------------------------------------------------


def test_busy_slots_and_the_jobs_before_it(timed_api: TimedApi) -> None:
    api = timed_api
    _measured(api)
    _, first, second = (api.submitted() for _ in range(3))
    found = api.explain(first)
    assert (_codes(found), found["ahead"], found["policy"]) == (["slots_busy"], 0, "priority")
    assert found["sentence"] == "It waits: the slot that could run it is taken, and it is next."
    assert found["servers"] == {"gpu1": "busy"}
    found = api.explain(second)
    assert (found["ahead"], found["before"], found["longest_overtaking_s"]) == (1, [first], None)
    assert found["sentence"] == "It waits: the slot that could run it is taken, and 1 job of its model comes before it."
    assert found["estimated_start_s"] == 120
    assert found["estimate_basis"] == {"jobs_before": 1, "mean_run_s": 60, "slots": 1}


def test_a_job_waits_behind_others_of_its_model_although_a_slot_is_free(timed_api: TimedApi) -> None:
    """The other jobs need the slot too; it is not offered yet."""
    api = timed_api
    api.register(attributes={"gpu": "A100"})
    _stop(api, "servers/gpu1")
    first, second = api.submitted(), api.submitted()
    api.dispatcher.queues.offer = lambda *_: []  # type: ignore[method-assign]
    _stop(api, "servers/gpu1", "online")
    assert api.explain(first)["sentence"] == "It waits: it is next, and is being offered a slot."
    found = api.explain(second)
    assert (_codes(found), found["servers"]) == (["turn"], {"gpu1": None})
    assert found["sentence"] == "It waits: 1 job of its model comes before it."


def test_explain_returns_the_overtaking_bound_of_the_models_policy(timed_api: TimedApi) -> None:
    api = timed_api
    api.model(policy="aging", tier_head_start=60.0)
    assert api.explain(api.submitted(priority=5))["longest_overtaking_s"] == 240
    assert api.explain(api.submitted(priority=1))["longest_overtaking_s"] == 0


def test_a_job_that_was_offered_is_being_started(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    found = api.explain(api.submitted())
    assert (_codes(found), found["ahead"], found["estimated_start_s"]) == ([], None, 0)
    assert "being started" in found["sentence"]


def test_a_job_that_is_not_in_the_queue_yet_waits_for_the_next_sweep(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    job = a_queued_job(api.dispatcher.store)
    found = api.explain(job.id)
    assert _codes(found) == ["not_in_room"]
    assert "the next sweep enqueues it" in found["sentence"]
    passes.reconcile(api.dispatcher)
    assert "being started" in api.explain(job.id)["sentence"]


# -- placement -----------------------------------------------------------------------------------------------------


def test_a_model_without_a_server(timed_api: TimedApi) -> None:
    api = timed_api
    api.model()
    found = api.explain(api.submitted())
    assert (_codes(found), found["servers"], found["estimated_start_s"]) == (["no_server"], {}, None)
    assert "POST /admin/register" in found["sentence"]


def test_a_job_whose_constraints_no_server_meets_waits_and_names_them(timed_api: TimedApi) -> None:
    api = timed_api
    _measured(api)
    api.register(attributes={"gpu": "A100", "memory": 40})
    found = api.explain(api.submitted(constraints={"gpu": "H100", "memory": {"min": 20}}))
    assert (_codes(found), found["estimated_start_s"]) == (["constraints_unmet"], None)
    assert found["sentence"] == "It waits: no known server of model 'zimg' meets gpu=H100, memory>=20."
    assert found["servers"] == {"gpu1": "does not meet gpu=H100"}


def test_a_job_waits_only_for_servers_that_meet_its_constraints(timed_api: TimedApi) -> None:
    api = timed_api
    api.register(server="gpu1", attributes={"gpu": "A100"})
    api.register(server="gpu2", attributes={"gpu": "H100"})
    wanted = {"constraints": {"gpu": "H100"}}
    api.submitted(**wanted)
    found = api.explain(api.submitted(**wanted))
    assert (_codes(found), found["servers"]) == (["slots_busy"], {"gpu1": "does not meet gpu=H100", "gpu2": "busy"})


def test_a_job_that_waits_for_a_paused_server_names_the_server_and_the_reason(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    _stop(api, "servers/gpu1")
    found = api.explain(api.submitted())
    assert _codes(found) == ["server_unavailable"]
    assert found["waits_for"][0]["subject"] == "gpu1"
    assert found["sentence"] == "It waits: server 'gpu1' is paused (new driver)."


@pytest.mark.parametrize("settings", [{"BREAKER_FAILURES": "3", "BREAKER_OPEN_MS": "5000"}])
def test_an_open_breaker_of_a_server_and_until_when(timed_api: TimedApi, settings: dict[str, str]) -> None:
    api = timed_api
    api.register()
    for _ in range(3):
        api.submitted()
        api.run(SECOND, Reason.SERVER_ERROR)
    found = api.explain(api.submitted())
    assert _codes(found) == ["server_breaker_open"]
    assert found["waits_for"][0] | {"sentence": ""} == {
        "code": "server_breaker_open",
        "sentence": "",
        "subject": "gpu1",
        "until": "2027-01-15T08:00:08.000Z",
    }
    why = "server 'gpu1' failed several runs in a row and its breaker is open"
    assert found["sentence"] == f"It waits: {why} until 2027-01-15T08:00:08Z."


def test_an_unreachable_server_is_explained_with_the_start_and_end_of_its_cooldown(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    cooldown_ms = cool_down(api.dispatcher, "zimg", "gpu1")
    found = api.explain(api.submitted())
    assert (_codes(found), found["servers"]) == (["server_away"], {"gpu1": "away"})
    assert "could not be reached since 2027-01-15T08:00:00Z" in found["sentence"]
    assert found["estimated_start_s"] is None
    assert found["waits_for"][0]["until"] == f"2027-01-15T08:00:0{cooldown_ms // 1000}.000Z"


def test_explain_lists_a_busy_server_and_a_server_in_cooldown(timed_api: TimedApi) -> None:
    api = timed_api
    api.register(server="gpu1")
    api.submitted()
    api.register(server="gpu2")
    cool_down(api.dispatcher, "zimg", "gpu2")
    found = api.explain(api.submitted())
    assert (_codes(found), found["estimated_start_s"]) == (["slots_busy", "server_away"], None)


# -- tenants and models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["paused", "frozen"])
def test_a_job_of_a_stopped_tenant_names_the_tenants_state_and_the_reason(timed_api: TimedApi, state: str) -> None:
    api = timed_api
    _measured(api)
    api.submitted()
    job_id = api.submitted()
    _stop(api, "tenants/default", state, "unpaid")
    found = api.explain(job_id)
    assert _codes(found)[0] == "tenant_paused"
    assert f"tenant 'default' is {state} (unpaid)" in found["sentence"]
    assert found["estimated_start_s"] is None
    assert api.client.get(f"/queue/jobs/{job_id}").json["estimated_start_s"] is None


def test_a_tenant_that_holds_all_it_may(timed_api: TimedApi) -> None:
    api = timed_api
    api.register(slots=3)
    api.model(tenant_slots=2)
    api.submitted(), api.submitted()
    found = api.explain(api.submitted())
    assert (_codes(found), found["servers"]) == (["tenant_slots"], {"gpu1": None})
    assert found["sentence"] == "It waits: its tenant holds 2 slots and may hold no more."


def test_a_tenant_that_holds_all_slots_of_all_models_that_it_may(timed_api: TimedApi) -> None:
    api = timed_api
    api.register(slots=3)
    assert api.client.patch("/admin/limits", json={"max_slots": 2}).status_code == 200
    api.submitted(), api.submitted()
    found = api.explain(api.submitted())
    assert (_codes(found), found["servers"]) == (["max_slots"], {"gpu1": None})
    assert found["sentence"] == (
        "It waits: its tenant may hold 2 slots at once, of all models that share these servers."
    )


@pytest.mark.parametrize("state", ["paused", "frozen"])
def test_a_job_of_a_stopped_model_names_the_models_state_and_the_reason(timed_api: TimedApi, state: str) -> None:
    api = timed_api
    api.model()
    job_id = api.submitted()
    _stop(api, "models/zimg", state)
    api.register()
    found = api.explain(job_id)
    assert _codes(found) == ["model_paused"]
    assert found["sentence"] == f"It waits: model 'zimg' is {state} (new driver)."


def test_an_open_breaker_of_a_model_and_until_when(timed_api: TimedApi) -> None:
    api = timed_api
    api.register(slots=2)
    api.model(breaker_failures=2)
    for _ in range(2):
        api.submitted()
        api.run(SECOND, Reason.SERVER_ERROR)
    probe = api.submitted()
    found = api.explain(probe)
    assert (_codes(found), found["waits_for"][0]["subject"]) == (["model_breaker_open"], "zimg")
    assert found["waits_for"][0]["until"] == "2027-01-15T08:00:07.000Z"
    waiting = api.submitted()
    api.later(6 * SECOND)
    passes.sweep(api.dispatcher)
    assert "being started" in api.explain(probe)["sentence"]
    assert _codes(api.explain(waiting)) == ["model_probing"]


# -- not in line -----------------------------------------------------------------------------------------------------


def test_a_job_that_waits_for_a_retry_shows_the_error_and_the_time(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    api.model(retry_backoff=1000.0, retry_backoff_max=1000.0)
    job_id = api.submitted()
    api.run(SECOND, Reason.SERVER_ERROR)
    found, due_ms = api.explain(job_id), api.job(job_id).due_ms
    assert due_ms is not None and due_ms > T0 + 800 * SECOND
    assert (found["status"], _codes(found)) == ("delayed", ["retry"])
    assert found["sentence"].startswith("It waits: attempt 1 failed (server_error: out of memory)")
    shown = api.client.get(f"/queue/jobs/{job_id}").json
    assert found["waits_for"][0]["until"] == shown["not_before"]
    assert found["sentence"].endswith("Z.") and " until 2027-01-15T08:1" in found["sentence"]


def test_a_job_submitted_for_later_shows_its_time(timed_api: TimedApi) -> None:
    api = timed_api
    api.model()
    found = api.explain(api.submitted(not_before=3600))
    assert (found["status"], _codes(found)) == ("delayed", ["not_before"])
    assert found["sentence"] == "It waits: it was submitted for later until 2027-01-15T09:00:00Z."


def test_a_running_job_shows_its_slot_and_a_requested_cancel(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    job_id = api.started().run.job.id
    assert api.explain(job_id)["sentence"] == "It runs on gpu1-slot0, attempt 1."
    api.client.post(f"/queue/jobs/{job_id}/cancel")
    assert "a cancel is requested" in api.explain(job_id)["sentence"]


@pytest.mark.parametrize("state", sorted(set(State) - {State.QUEUED, State.DELAYED, State.RUNNING}))
def test_an_ended_job_shows_its_outcome_and_its_error(timed_api: TimedApi, state: State) -> None:
    job = a_job_in(timed_api.dispatcher.store, state)
    found = timed_api.explain(job.id)
    assert (found["status"], found["waits_for"]) == (state, [])
    sentence = f"It has ended: {state}.  {END_SENTENCES[Reason(job.why)]}"
    if state in (State.DEAD, State.FAILED):
        sentence += "  Its error: model_error: out of memory."
    if state is State.DEAD:
        sentence += f"  To try it again: slotkeeper dlq retry {job.id}"
    assert found["sentence"] == sentence


def test_a_completed_job_without_a_result_says_that_the_described_place_was_empty(timed_api: TimedApi) -> None:
    store = timed_api.dispatcher.store
    run = a_running_job(store)
    store_end(store, run.job.id, run.attempt, Reason.FINISHED, T0, result="null")
    assert "nothing, where the server's description says" in timed_api.explain(run.job.id)["sentence"]
    assert "where the server&#39;s description says" in timed_api.client.get(f"/page/jobs/{run.job.id}").text


def test_explain_returns_what_the_database_holds_while_redis_is_down(mortal_api: Api) -> None:
    mortal_api.model()
    job_id = mortal_api.submitted()
    mortal_api.valkey.kill()
    found = mortal_api.client.get(f"/queue/jobs/{job_id}/explain").json
    assert (found["status"], _codes(found), found["ahead"]) == ("queued", ["redis_away"], None)


def test_an_unknown_job_is_not_explained(api: Api) -> None:
    assert api.client.get("/queue/jobs/none/explain").status_code == 404
