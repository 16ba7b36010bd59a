"""Pausing, draining, freezing and resuming servers, models and tenants."""

from collections.abc import Callable
from typing import Any

import pytest

from routing.queries.server_status import read_servers
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.values import JobError
from tests.support import passes
from tests.support.api import NOTHING, Api, TimedApi
from tests.support.ends import cool_down, end_run_with, free
from tests.support.visitor import visitor
from tools.cluster.direct_starts import begin_run

STATES = ["paused", "draining", "frozen"]
KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])


def _set(api: Api, path: str, state: str, reason: str | None = None, **more: Any) -> Any:
    body = {"state": state} | ({} if reason is None else {"reason": reason})
    return api.client.patch(f"/admin/{path}", json=body, **more)


def _offered(api: Api) -> list[str]:
    return [offer.job_id for offer in api.notifications.offers]


def _servers(api: Api) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.client.get("/admin/servers").json["servers"]
    return found


# -- servers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_a_server_that_is_not_online_gets_nothing_new_and_submits_are_accepted(timed_api: TimedApi, state: str) -> None:
    api = timed_api
    api.register()
    answer = _set(api, "servers/gpu1", state, "new driver").json
    assert (answer["state"], answer["reason"], answer["changed_by"]) == (state, "new driver", "default")
    assert answer["changed_at"] == "2027-01-15T08:00:00.000Z"
    job_id = api.submitted()
    assert _offered(api) == []
    back = _set(api, "servers/gpu1", "online").json
    assert (back["state"], back["reason"]) == ("online", None)
    assert _offered(api) == [job_id]


_SOON = [{"BREAKER_FAILURES": "3", "BREAKER_OPEN_MS": "5000"}]


def _broken(api: TimedApi) -> str:
    """Open a server's breaker and return the id of a job that waits for the server."""
    api.register()
    for _ in range(3):
        api.submitted()
        api.run(1_000, Reason.SERVER_ERROR)
    api.notifications.offers.clear()
    return api.submitted()


@pytest.mark.parametrize("settings", _SOON)
def test_a_breaker_is_listed_until_when_and_why(timed_api: TimedApi, settings: dict[str, str]) -> None:
    _broken(timed_api)
    found = _servers(timed_api)[0]["status"]
    assert (found["breaker"], found["breaker_why"], found["breaker_opened"]) == ("open", "failures", 1)
    assert found["breaker_until"] == "2027-01-15T08:00:08.000Z"


@pytest.mark.parametrize("settings", _SOON)
def test_resuming_a_server_closes_its_breaker(timed_api: TimedApi, settings: dict[str, str]) -> None:
    job_id = _broken(timed_api)
    assert _offered(timed_api) == []
    _set(timed_api, "servers/gpu1", "online")
    found = _servers(timed_api)[0]["status"]
    assert (found["breaker"], found["breaker_until"], found["breaker_why"]) == ("closed", None, None)
    assert _offered(timed_api) == [job_id]


@pytest.mark.parametrize("settings", _SOON)
def test_a_reset_closes_a_servers_breaker_and_clears_its_failures(
    timed_api: TimedApi, settings: dict[str, str]
) -> None:
    api, job_id = timed_api, _broken(timed_api)
    answer = api.client.post("/admin/servers/gpu1/reset")
    assert (answer.status_code, answer.json["status"]["breaker"]) == (200, "closed")
    assert answer.json["status"]["scores"]["zimg"]["failures"] == 0
    assert _offered(api) == [job_id]


def test_a_reset_ends_the_cooldown_of_slots_that_were_busy(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    api.submitted()
    for _ in range(3):
        api.run(0, Reason.SERVER_BUSY)
        api.client.post("/admin/servers/gpu1/reset")
        assert _servers(api)[0]["status"]["cooling"] == 0 and len(api.notifications.offers) == 1
    api.run(0, Reason.SERVER_BUSY)
    rested = read_servers(api.dispatcher.slots, "zimg")["gpu1"].cooldown_until_ms
    assert rested - api.now == api.dispatcher.settings.busy_cooldown_ms, "the reset clears the count of busy answers"


def test_a_reset_leaves_a_server_as_paused_as_it_was(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    _set(api, "servers/gpu1", "paused", "new driver")
    answer = api.client.post("/admin/servers/gpu1/reset")
    assert (answer.json["state"], answer.json["reason"]) == ("paused", "new driver")
    assert api.client.post("/admin/servers/nobody/reset").status_code == 404


def test_a_quarantined_slot_is_listed_with_its_job_and_reason(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    job_id = api.submitted()
    task = begin_run(api.dispatcher, api.notifications.offers.pop(0), "a-worker")
    assert task is not None and _servers(api)[0]["quarantined"] == []
    end_run_with(
        api.dispatcher,
        task,
        Reason.RETRIES_EXHAUSTED,
        error=JobError("timed_out", "late"),
        server_still_running="timed_out",
    )
    (found,) = _servers(api)[0]["quarantined"]
    assert (found["slot"], found["job_id"], found["reason"]) == ("gpu1-slot0", job_id, "timed_out")
    assert found["until"] > found["since"] and job_id in found["sentence"]


@pytest.mark.parametrize("state", STATES)
def test_a_run_ends_normally_on_a_stopped_server(timed_api: TimedApi, state: str) -> None:
    api = timed_api
    api.register()
    running, waiting = api.submitted(), api.submitted()
    task = begin_run(api.dispatcher, api.notifications.offers.pop(0), "a-worker")
    assert task is not None and task.run.job.id == running
    _set(api, "servers/gpu1", state)
    assert api.dispatcher.leases.renew("zimg", "a-worker", [task.lease])[0] == "renewed"
    free(api.dispatcher, task.lease, return_to_lane=False)
    assert _offered(api) == []
    _set(api, "servers/gpu1", "online")
    assert _offered(api) == [waiting]


# -- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_a_model_that_is_stopped(api: Api, state: str) -> None:
    """paused: accepts and starts nothing; draining: starts and accepts nothing new; frozen: neither."""
    api.model()
    waiting = api.submitted()
    assert _set(api, "models/zimg", state, "bad weights").json["reason"] == "bad weights"
    api.register()
    assert _offered(api) == ([waiting] if state == "draining" else [])
    answer = api.submit()
    if state == "paused":
        assert answer.status_code == 202
    else:
        assert (answer.status_code, answer.json["code"], answer.json["state"]) == (409, "conflict", state)
        assert "bad weights" in answer.json["detail"] and "until an operator resumes it" in answer.json["detail"]
    _set(api, "models/zimg", "online")
    assert waiting in _offered(api)
    assert api.submit().status_code == 202


def test_a_stopped_model_leaves_others_of_its_server_alone(api: Api) -> None:
    api.register(model="zimg")
    api.register(model="flux")
    _set(api, "models/zimg", "frozen")
    assert api.submit(model="flux").status_code == 202
    assert len(_offered(api)) == 1
    shown = {model["model"]: model["state"] for model in api.client.get("/admin/models").json["models"]}
    assert shown == {"zimg": "frozen", "flux": "online"}


def test_one_job_of_a_draining_model_refuses_the_whole_batch(api: Api) -> None:
    api.model("zimg")
    api.model("flux")
    _set(api, "models/flux", "draining")
    jobs = [{"model": model, "payload": {}} for model in ("zimg", "flux")]
    answer = api.client.post("/queue/submit-batch", json=jobs)
    assert (answer.status_code, answer.json["model"]) == (409, "flux")
    assert api.stored() == NOTHING


# -- tenants -------------------------------------------------------------------------------------------------------


@KEYED
@pytest.mark.parametrize("state", STATES)
def test_a_tenant_that_is_stopped_in_every_fleet(api: Api, settings: dict[str, str], state: str) -> None:
    boss, acme, zeta = api.tenant("boss", admin=True), api.tenant("acme"), api.tenant("zeta")
    for model in ("zimg", "flux"):
        api.client.put(f"/admin/model-configs/{model}", json={}, headers=boss)
    waiting = [api.submitted(acme, model=model) for model in ("zimg", "flux")]
    answer = _set(api, "tenants/acme", state, "unpaid", headers=boss).json
    assert (answer["tenant"], answer["state"], answer["reason"], answer["changed_by"]) == (
        "acme",
        state,
        "unpaid",
        "boss",
    )
    for model in ("zimg", "flux"):
        body = {"model": model, "server": f"{model}-1", "endpoint": "http://127.0.0.1:9/x", "slots": 4}
        api.client.post("/admin/register", json=body, headers=boss)
    assert _offered(api) == (waiting if state == "draining" else [])
    refused = api.submit(acme)
    assert refused.status_code == (202 if state == "paused" else 409)
    if state != "paused":
        assert "'acme'" in refused.json["detail"] and "unpaid" in refused.json["detail"]
    api.submitted(zeta)
    _set(api, "tenants/acme", "online", headers=boss)
    assert set(waiting) <= set(_offered(api))
    assert api.submit(acme).status_code == 202


@KEYED
def test_tenants_are_listed_without_their_keys(api: Api, settings: dict[str, str]) -> None:
    boss, acme = api.tenant("boss", admin=True), api.tenant("acme")
    assert _set(api, "tenants/celery/batch", "frozen", headers=boss).json["keys"] == 0
    _set(api, "tenants/acme", "paused", headers=boss)
    answer = api.client.get("/admin/tenants", headers=boss)
    listed = {one["tenant"]: (one["keys"], one["operates"], one["state"]) for one in answer.json["tenants"]}
    assert listed == {
        "acme": (1, False, "paused"),
        "boss": (1, True, "online"),
        "celery/batch": (0, False, "frozen"),
    }
    key = acme["Authorization"].partition(" ")[2]
    assert key not in answer.text and "hash" not in answer.text
    _set(api, "tenants/celery/batch", "online", headers=boss)
    names = [tenant["tenant"] for tenant in api.client.get("/admin/tenants", headers=boss).json["tenants"]]
    assert names == ["acme", "boss"]


@pytest.mark.parametrize("name", ["%00", "x" * 201, "a%1bb"])
def test_a_name_that_no_tenant_has_is_refused(api: Api, name: str) -> None:
    answer = _set(api, f"tenants/{name}", "paused")
    assert (answer.status_code, answer.json["field"]) == (422, "tenant")
    assert api.client.get("/admin/tenants").json["tenants"] == []


# -- refused, and away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["servers/gpu1", "models/zimg", "tenants/acme"])
@pytest.mark.parametrize(
    "body, field",
    [
        ({"state": "broken"}, "state"),
        ({"state": "Paused"}, "state"),
        ({"state": "paused", "slots": 2}, "slots"),
        ({"state": "paused", "reason": 7}, "reason"),
        ({"state": "paused", "reason": "x" * 501}, "reason"),
        ({"state": "paused", "changed_by": "me"}, "changed_by"),
    ],
)
def test_a_wrong_change_is_refused_and_changes_nothing(api: Api, path: str, body: dict[str, Any], field: str) -> None:
    api.register()
    answer = api.client.patch(f"/admin/{path}", json=body)
    assert (answer.status_code, answer.json["field"]) == (422, field)
    assert _servers(api)[0]["state"] == "online"
    assert api.client.get("/admin/models/zimg").json["state"] == "online"
    assert api.client.get("/admin/tenants").json["tenants"] == []


@pytest.mark.parametrize("path", ["servers/gpu1", "models/zimg"])
@pytest.mark.parametrize("body", [{}, {"state": None}])
def test_a_change_of_a_server_or_model_names_its_state(api: Api, path: str, body: dict[str, Any]) -> None:
    api.register()
    answer = api.client.patch(f"/admin/{path}", json=body)
    assert (answer.status_code, answer.json["field"]) == (422, "state")
    assert _servers(api)[0]["state"] == "online"


@pytest.mark.parametrize("path", ["servers/nobody", "models/nobody"])
def test_an_unknown_server_or_model_cannot_be_paused(api: Api, path: str) -> None:
    assert _set(api, path, "paused").status_code == 404


@pytest.mark.parametrize(
    "reason, status, kept", [(b"a NUL \\u0000 and \\u00fc", 200, "a NUL  and ü"), (b"half \\ud83d a pair", 422, None)]
)
def test_an_odd_reason_is_kept_as_far_as_it_can_be(api: Api, reason: bytes, status: int, kept: str | None) -> None:
    api.register()
    raw = b'{"state":"paused","reason":"%s"}' % reason
    answer = api.client.patch("/admin/servers/gpu1", data=raw, content_type="application/json")
    assert (answer.status_code, answer.json.get("field")) == (status, None if kept else "reason")
    assert _servers(api)[0]["reason"] == kept


@pytest.mark.parametrize("path", ["servers/gpu1", "models/zimg", "tenants/default"])
def test_without_redis_a_change_takes_effect_by_the_sweep(mortal_api: Api, path: str) -> None:
    api = mortal_api
    api.register()
    api.valkey.kill()
    assert _set(api, path, "paused").status_code == 200
    api.valkey.start()
    passes.sweep(api.dispatcher)
    job_id = api.submitted()
    passes.sweep(api.dispatcher)
    assert _offered(api) == []
    assert _set(api, path, "online").status_code == 200
    passes.reconcile(api.dispatcher)
    passes.sweep(api.dispatcher)
    assert _offered(api) == [job_id]


# -- free, or not --------------------------------------------------------------------------------------------------


def _pause(api: TimedApi) -> None:
    assert api.client.patch("/admin/servers/gpu1", json={"state": "paused"}).status_code == 200


def _fail(api: TimedApi) -> None:
    for _ in range(3):
        api.submitted()
        api.run(1_000, Reason.SERVER_ERROR)


def _cool(api: TimedApi) -> None:
    cool_down(api.dispatcher, "zimg", "gpu1")


@pytest.mark.parametrize("settings", [{"BREAKER_FAILURES": "3", "BREAKER_OPEN_MS": "5000"}])
@pytest.mark.parametrize(
    "act, word, tile", [(_pause, "paused", "paused"), (_fail, "breaker open", "breaker"), (_cool, "away", "away")]
)
def test_no_slot_is_shown_as_free_that_the_next_job_cannot_have(
    timed_api: TimedApi, act: Callable[[TimedApi], None], word: str, tile: str, settings: dict[str, str]
) -> None:
    timed_api.register(slots=2)
    before = _servers(timed_api)[0]
    assert (before["running"], before["free"], before["blocked_by"]) == (0, 2, None)
    assert visitor(timed_api).get("/").text.count("<b>free</b>") == 2
    act(timed_api)
    found = _servers(timed_api)[0]
    assert (found["running"], found["free"], found["blocked_by"]) == (0, 0, word)
    for path in ("/", "/page/models/zimg", "/page/servers/gpu1"):
        shown = visitor(timed_api).get(path).text
        assert "<b>free</b>" not in shown and shown.count(f"<b>{tile}</b>") >= 2, path
