"""Servers, models, the dead letter queue and the ledger, over REST."""

import re
from typing import Any
from urllib.parse import quote

import pytest

from routing.admission.submission import PATH_WORDS
from slotkeeper.jobs.states import State
from slotkeeper.outbox import retention
from slotkeeper.registry import tenants
from tests.support.api import ENDPOINT, Api
from tests.support.builders import T0, a_job_in, a_queued_job, an_ended_job

ODD_NAMES = ["flux-1.dev", "black-forest-labs/FLUX.1-dev", "a//b", "llama3:8b", "m@v1+x"]


# -- servers ---------------------------------------------------------------------------------------------------


def test_a_registered_server_runs_the_jobs_that_wait(api: Api) -> None:
    api.model()
    job_id = api.submitted()
    assert api.register().status_code == 201
    assert [offer.job_id for offer in api.notifications.offers] == [job_id]


def test_registering_again_changes_it(api: Api) -> None:
    api.register(slots=1)
    answer = api.register(slots=3, endpoint="https://gpu1:9001/v2")
    assert (answer.status_code, answer.json["slots"]) == (200, 3)
    assert answer.json["models"] == {"zimg": "https://gpu1:9001/v2"}
    assert api.client.get("/admin/servers").json["fleets"][0]["free"] == 3


def test_names_may_hold_slashes_dots_and_hyphens(api: Api) -> None:
    for number, model in enumerate(ODD_NAMES):
        server = f"rack/{number}.gpu-1"
        assert api.register(model=model, server=server).status_code == 201
        assert api.client.patch(f"/admin/servers/{server}", json={"state": "paused"}).json["state"] == "paused"
        assert api.client.put(f"/admin/model-configs/{model}", json={"max_retries": 7}).status_code == 200
        assert api.client.get(f"/admin/model-configs/{model}").json["config"]["max_retries"] == 7
        assert api.client.delete(f"/admin/model-configs/{model}").json["overrides"] == {}
        job_id = api.submitted(model=model)
        assert api.client.get("/queue/jobs", query_string={"model": model}).json["jobs"][0]["job_id"] == job_id
        assert api.client.delete(f"/admin/servers/{server}").status_code == 200
    assert {model["model"] for model in api.client.get("/admin/models").json["models"]} == set(ODD_NAMES)


def test_draining_and_paused_servers_get_no_offers_and_online_servers_do(api: Api) -> None:
    api.register()
    for state in ("draining", "paused"):
        api.client.patch("/admin/servers/gpu1", json={"state": state})
        job_id = api.submitted()
        assert job_id not in [offer.job_id for offer in api.notifications.offers]
    assert api.notifications.offers == []
    api.client.patch("/admin/servers/gpu1", json={"state": "online"})
    assert len(api.notifications.offers) == 1


def test_servers_and_their_slots_are_listed(api: Api) -> None:
    api.register(slots=3)
    api.register(model="flux", server="gpu2")
    api.submitted()
    listed = api.client.get("/admin/servers").json
    assert [(server["server"], server["state"]) for server in listed["servers"]] == [
        ("gpu1", "online"),
        ("gpu2", "online"),
    ]
    fleets = {fleet["fleet"]: fleet for fleet in listed["fleets"]}
    assert (fleets["zimg"]["free"], fleets["zimg"]["taken"], fleets["zimg"]["waiting"]) == (2, 1, 0)


@pytest.mark.parametrize(
    "field, value",
    [
        ("model", ""),
        ("model", "-x"),
        ("model", "a b"),
        ("model", "ü"),
        ("model", "x\0"),
        ("server", "../x"),
        ("server", 7),
        ("slots", 0),
        ("slots", 1025),
        ("slots", "2"),
        ("slots", True),
        ("slots", 1.5),
        ("endpoint", "gpu1:9001"),
        ("endpoint", "ftp://gpu1/x"),
        ("endpoint", "http://"),
        ("endpoint", "http://gpu1:99999/x"),
        ("endpoint", "http://gpu1:0/x"),
        ("endpoint", "http://me:secret@gpu1/x"),
        ("endpoint", "http://gpu1/a b"),
        ("endpoint", "http://gpu1\\@evil/"),
        ("endpoint", "http://gpu1/\r\nX: y"),
        ("endpoint", "http://gpü1/"),
        ("endpoint", "http://" + "x" * 3000),
        ("wieght", 1),
    ],
)
def test_a_wrong_registration_is_refused_and_leaves_nothing(api: Api, field: str, value: Any) -> None:
    answer = api.register(**{field: value})
    assert (answer.status_code, answer.json["field"]) == (422, field)
    assert field in answer.json["detail"]
    assert api.client.get("/admin/servers").json["servers"] == []
    assert "secret" not in answer.text


def test_a_server_cannot_take_over_a_model_that_another_server_serves(api: Api) -> None:
    api.register(model="zimg", server="gpu1")
    api.register(model="flux", server="gpu2")
    answer = api.register(model="zimg", server="gpu2")
    assert (answer.status_code, answer.json["code"]) == (409, "conflict")


@pytest.mark.parametrize("act", ["patch", "delete"])
def test_an_unknown_server_is_not_found(api: Api, act: str) -> None:
    body = {"json": {"state": "paused"}} if act == "patch" else {}
    assert getattr(api.client, act)("/admin/servers/nobody", **body).status_code == 404


def test_the_response_for_one_server_equals_its_entry_in_the_list(api: Api) -> None:
    for name in ("gpu1", "rack2/gpu"):
        api.register(server=name)
    for listed in api.client.get("/admin/servers").json["servers"]:
        shown = api.client.get(f"/admin/servers/{quote(listed['server'])}").json
        assert shown == listed
    assert api.client.get("/admin/servers/nobody").status_code == 404


def test_a_server_that_is_registered_again_without_slots_keeps_them(api: Api) -> None:
    body = {"model": "zimg", "server": "gpu1", "endpoint": "http://gpu1:9001/generate"}
    assert api.client.post("/admin/register", json=body).json["slots"] == 1
    assert api.client.post("/admin/register", json=body | {"slots": 8}).json["slots"] == 8
    assert api.client.post("/admin/register", json=body).json["slots"] == 8
    assert api.client.post("/admin/register", json=body | {"weight": 2}).json["slots"] == 8


@pytest.mark.parametrize("body", [{}, {"state": "broken"}, {"state": None}, {"state": "paused", "slots": 2}])
def test_a_wrong_change_of_a_server_is_refused(api: Api, body: dict[str, Any]) -> None:
    api.register()
    assert api.client.patch("/admin/servers/gpu1", json=body).status_code == 422
    assert api.client.get("/admin/servers").json["servers"][0]["state"] == "online"


def test_the_catalog_can_be_changed_while_redis_is_down(mortal_api: Api) -> None:
    api = mortal_api
    api.valkey.kill()
    assert api.register().status_code == 201
    assert api.client.patch("/admin/servers/gpu1", json={"state": "paused"}).status_code == 200
    assert api.client.put("/admin/model-configs/zimg", json={"max_retries": 1}).status_code == 200
    listed = api.client.get("/admin/servers").json
    assert (listed["servers"][0]["server"], listed["fleets"]) == ("gpu1", None)
    assert api.client.get("/admin/models").json["models"][0]["waiting"] is None
    assert api.client.delete("/admin/servers/gpu1").status_code == 200


# -- configurations --------------------------------------------------------------------------------------------


def test_an_override_is_shown_beside_its_default(api: Api) -> None:
    answer = api.client.put("/admin/model-configs/flux", json={"model_type": "async", "poll_interval": 3}).json
    assert (answer["config"]["poll_interval"], answer["defaults"]["poll_interval"]) == (3.0, 2.0)
    assert answer["overrides"] == {"model_type": "async", "poll_interval": 3.0}
    assert api.client.get("/admin/model-configs/flux").json == answer


def test_a_put_replaces_all_earlier_overrides(api: Api) -> None:
    api.client.put("/admin/model-configs/flux", json={"max_retries": 1})
    answer = api.client.put("/admin/model-configs/flux", json={"policy": "fifo"}).json
    assert answer["overrides"] == {"policy": "fifo"}


def test_a_delete_restores_the_default_configuration(api: Api) -> None:
    api.client.put("/admin/model-configs/flux", json={"max_retries": 1})
    answer = api.client.delete("/admin/model-configs/flux").json
    assert (answer["overrides"], answer["config"]) == ({}, answer["defaults"])


def test_a_changed_policy_applies_at_once(api: Api) -> None:
    api.model()
    low, urgent = api.submitted(priority=9), api.submitted(priority=1)
    assert api.client.get(f"/queue/jobs/{urgent}").json["position"] == 1
    api.model(policy="fifo")
    assert api.client.get(f"/queue/jobs/{low}").json["position"] == 1


@pytest.mark.parametrize(
    "field, value",
    [
        ("model_type", "batch"),
        ("poll_endpoint_template", "status"),
        ("poll_interval", 0),
        ("poll_interval", "2"),
        ("poll_interval", 1e6),
        ("max_poll_time", -1),
        ("max_retries", 1.5),
        ("max_retries", True),
        ("max_crashes", 0),
        ("retry_backoff", 3000),
        ("max_payload_bytes", 1 << 40),
        ("default_ttl", 1e300),
        ("policy", "random"),
        ("max_retry", 3),
    ],
)
def test_a_wrong_override_is_named_and_changes_nothing(api: Api, field: str, value: Any) -> None:
    api.model("flux", max_retries=9)
    answer = api.client.put("/admin/model-configs/flux", json={field: value})
    assert (answer.status_code, answer.json["field"]) == (422, field)
    assert api.client.get("/admin/model-configs/flux").json["overrides"] == {"max_retries": 9}


@pytest.mark.parametrize("name", ["-x", "a b", "x" * 200, "%00"])
def test_a_name_that_no_model_can_have_is_refused(api: Api, name: str) -> None:
    answer = api.client.put(f"/admin/model-configs/{name}", json={})
    assert (answer.status_code, answer.json["field"]) == (422, "model")


@pytest.mark.parametrize("act", ["get", "delete"])
def test_an_unknown_model_has_no_configuration(api: Api, act: str) -> None:
    assert getattr(api.client, act)("/admin/model-configs/nobody").status_code == 404
    assert api.client.get("/admin/models").json["models"] == []


# -- the dead letter queue -------------------------------------------------------------------------------------


def test_dead_jobs_are_listed_page_by_page(api: Api) -> None:
    dead = [an_ended_job(api.dispatcher.store, State.DEAD).id for _ in range(3)]
    an_ended_job(api.dispatcher.store, State.FAILED)
    first = api.client.get("/admin/dlq?limit=2").json
    rest = api.client.get("/admin/dlq", query_string={"limit": 2, "cursor": first["next_cursor"]}).json
    assert [job["job_id"] for job in first["jobs"] + rest["jobs"]] == dead[::-1]
    assert rest["next_cursor"] is None
    assert first["jobs"][0]["error"]["code"] == "max_retries_exceeded"


def test_a_dead_job_is_retried_by_a_person(api: Api) -> None:
    api.model()
    dead = an_ended_job(api.dispatcher.store, State.DEAD)
    answer = api.client.post(f"/admin/dlq/{dead.id}/retry")
    assert (answer.status_code, answer.json["status"], answer.json["failures"]) == (200, "queued", 0)
    assert api.client.get(f"/queue/jobs/{dead.id}").json["position"] == 1
    assert api.client.post(f"/admin/dlq/{dead.id}/retry").status_code == 409


def test_all_dead_jobs_are_retried_in_the_order_of_their_acceptance(api: Api) -> None:
    api.model()
    dead = [an_ended_job(api.dispatcher.store, State.DEAD).id for _ in range(5)]
    younger = a_queued_job(api.dispatcher.store)
    assert api.client.post("/admin/dlq/retry-all").json == {"retried": 5, "more": False, "left_out": 0, "unpaid": []}
    assert [job.id for job in api.dispatcher.store.list_queued(["zimg"])] == [*dead, younger.id]
    assert api.client.post("/admin/dlq/retry-all").json == {"retried": 0, "more": False, "left_out": 0, "unpaid": []}


def test_retry_all_with_a_model_retries_only_the_dead_jobs_of_that_model(api: Api) -> None:
    api.model()
    api.model("other")
    dead = [an_ended_job(api.dispatcher.store, State.DEAD, model=name).id for name in ("zimg", "other", "zimg")]
    assert api.client.post("/admin/dlq/retry-all?model=zimg").json == {
        "retried": 2,
        "more": False,
        "left_out": 0,
        "unpaid": [],
    }
    assert [api.job(job_id).state for job_id in dead] == [State.QUEUED, State.DEAD, State.QUEUED]
    for query in ("model=a%20b", "Model=other"):
        assert api.client.post(f"/admin/dlq/retry-all?{query}").status_code == 422, "an invalid query retries no job"
    assert api.job(dead[1]).state is State.DEAD


def test_retry_all_retries_a_limited_number_of_jobs_per_request(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.api import job_views

    monkeypatch.setattr(job_views, "_MAX_RETRIED", 2)
    api.model()
    for _ in range(3):
        an_ended_job(api.dispatcher.store, State.DEAD)
    answers = [api.client.post("/admin/dlq/retry-all").json for _ in range(2)]
    assert [(answer["retried"], answer["more"]) for answer in answers] == [(2, True), (1, False)]


def test_dead_jobs_of_a_removed_model_stay_and_keep_no_other_from_being_retried(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.api import job_views

    monkeypatch.setattr(job_views, "_MAX_RETRIED", 2)
    api.model()
    api.model("gone")
    dead = an_ended_job(api.dispatcher.store, State.DEAD).id
    left = [an_ended_job(api.dispatcher.store, State.DEAD, model="gone").id for _ in range(3)]
    assert api.client.delete("/admin/models/gone").status_code < 300
    assert api.client.post("/admin/dlq/retry-all").json == {"retried": 1, "more": False, "left_out": 3, "unpaid": []}
    assert [api.job(job_id).state for job_id in (dead, *left)] == [State.QUEUED, *[State.DEAD] * 3]


def test_a_dead_job_can_be_removed_for_good(api: Api) -> None:
    dead = an_ended_job(api.dispatcher.store, State.DEAD)
    assert api.client.delete(f"/admin/dlq/{dead.id}").status_code == 204
    assert api.client.get(f"/queue/jobs/{dead.id}").status_code == 404
    assert api.client.delete(f"/admin/dlq/{dead.id}").status_code == 404


@pytest.mark.parametrize("state", sorted(set(State) - {State.DEAD}))
def test_only_a_dead_job_can_be_retried_or_removed(api: Api, state: State) -> None:
    job = a_job_in(api.dispatcher.store, state)
    assert api.client.post(f"/admin/dlq/{job.id}/retry").status_code == 409
    assert api.client.delete(f"/admin/dlq/{job.id}").status_code == 409
    assert api.job(job.id) == job


# -- the ledger ------------------------------------------------------------------------------------------------


def test_job_3_the_ledger_balances_through_every_state_and_every_removal(api: Api) -> None:
    assert api.client.get("/admin/ledger").json["accepted"] == 0
    for number, state in enumerate(sorted(State), 1):
        a_job_in(api.dispatcher.store, state)
        ledger = api.client.get("/admin/ledger").json
        assert (ledger["accepted"], ledger["balanced"]) == (number, True)
    dead = an_ended_job(api.dispatcher.store, State.DEAD)
    api.client.delete(f"/admin/dlq/{dead.id}")
    retention.delete_ended_jobs(api.dispatcher.store.database, T0 + 1)
    ledger = api.client.get("/admin/ledger").json
    assert (ledger["accepted"], ledger["balanced"]) == (9, True)
    assert sum(ledger["by_state"].values()) == 3
    assert ledger["purged"] == {"completed": 1, "failed": 1, "expired": 1, "canceled": 1, "dead": 2}


def test_a_job_that_vanished_is_missed(api: Api) -> None:
    job = a_queued_job(api.dispatcher.store)
    for _ in range(3):
        a_queued_job(api.dispatcher.store, id=job.id)  # the same again is no second job
    assert api.client.get("/admin/ledger").json["balanced"]
    with api.database.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM jobs")
    ledger = api.client.get("/admin/ledger").json
    assert (ledger["accepted"], ledger["balanced"]) == (1, False)


def test_an_endpoint_is_kept_as_it_was_given(api: Api) -> None:
    api.register()
    assert api.client.get("/admin/servers").json["servers"][0]["models"] == {"zimg": ENDPOINT}


def test_no_name_may_end_in_a_path_word_that_follows_names_in_urls(api: Api) -> None:
    rules = [str(rule) for rule in api.client.application.url_map.iter_rules()]
    found = [re.search(r"<path:(?:model|server)>/(\w+)$", rule) for rule in rules]
    assert {word[1] for word in found if word} == PATH_WORDS
    found = [re.search(r"^/(?:admin/)?tenants/<path:tenant>/([\w-]+)$", rule) for rule in rules]
    assert {word[1] for word in found if word} == tenants.PATH_WORDS
    body = {"model": "zimg", "endpoint": "http://127.0.0.1:9/x"}
    refused = api.client.post("/admin/register", json=body | {"server": "gpu/check"})
    assert refused.status_code == 422 and "must not end with /check" in refused.json["detail"]
    assert api.client.post("/admin/register", json=body | {"server": "gpu/checks"}).status_code < 300
    assert api.client.get("/admin/servers/gpu/checks/check").json["server"] == "gpu/checks"
