"""Constraints of jobs, attributes and status of servers, over the REST API."""

from typing import Any

import pytest

from slotkeeper.jobs.states import Reason
from tests.support.api import NOTHING, Api, TimedApi
from tests.support.ends import cool_down

GPUS = {"gpu": ["H100", "A100"], "memory": {"min": 40}, "region": "eu"}


def _server(api: Api, name: str = "gpu1") -> dict[str, Any]:
    found: list[dict[str, Any]] = api.client.get("/admin/servers").json["servers"]
    return next(one for one in found if one["server"] == name)


# -- jobs ----------------------------------------------------------------------------------------------------------


def test_a_job_runs_only_where_its_constraints_are_met(api: Api) -> None:
    api.register(server="gpu1", attributes={"gpu": "A100", "memory": 24, "region": "eu"})
    job_id = api.submitted(constraints=GPUS)
    assert api.notifications.offers == []
    api.register(server="gpu2", attributes={"gpu": "A100", "memory": 80, "region": "eu"})
    assert [(offer.job_id, offer.server) for offer in api.notifications.offers] == [(job_id, "gpu2")]


def test_constraints_are_shown_again(api: Api) -> None:
    api.model()
    shown = api.client.get(f"/queue/jobs/{api.submitted(constraints=GPUS)}").json["constraints"]
    assert shown == {"gpu": ["A100", "H100"], "memory": {"min": 40}, "region": "eu"}
    assert api.client.get(f"/queue/jobs/{api.submitted()}").json["constraints"] == {}
    assert api.client.get(f"/queue/jobs/{api.submitted(constraints=None)}").json["constraints"] == {}
    again = api.submitted(constraints=shown)
    assert api.job(again).constraints == "gpu=A100,H100\nmemory>=40\nregion=eu"


def test_the_receipt_of_a_job_that_no_server_can_run_has_a_notice(api: Api) -> None:
    api.register(attributes={"gpu": "A100"})
    receipt = api.submit(constraints={"gpu": "H100"}).json
    assert (
        receipt["notice"] == "At present no known server of model 'zimg' meets gpu=H100; the job waits until one does."
    )
    assert (receipt["next_step"], receipt["estimated_start_s"]) == ("waiting", None)
    assert api.submit(constraints={"gpu": "A100"}).json["notice"] is None
    jobs = [{"model": "zimg", "payload": {}, "constraints": {"gpu": gpu}} for gpu in ("A100", "H100")]
    answer = api.client.post("/queue/submit-batch", json=jobs).json
    assert [one["notice"] is None for one in answer["jobs"]] == [True, False]


def test_a_job_without_a_matching_server_is_refused_if_the_model_sets_unmatched_to_refuse(api: Api) -> None:
    api.register(attributes={"gpu": "A100"})
    api.model(unmatched="refuse")
    answer = api.submit(constraints={"gpu": "H100"})
    assert (answer.status_code, answer.json["code"], answer.json["field"]) == (422, "invalid_job", "constraints")
    assert "no known server of model 'zimg' meets gpu=H100; change them, or register" in answer.json["detail"]
    assert api.stored() == NOTHING
    api.client.patch("/admin/servers/gpu1", json={"state": "paused"})
    assert api.submit(constraints={"gpu": "A100"}).status_code == 202, "a paused server counts as a known server"
    jobs = [{"model": "zimg", "payload": {}, "constraints": {"gpu": gpu}} for gpu in ("A100", "H100")]
    assert api.client.post("/queue/submit-batch", json=jobs).json["index"] == 1


def test_the_same_key_with_other_constraints_is_a_conflict(api: Api) -> None:
    api.model()
    key = {"Idempotency-Key": "k-1"}
    first = api.submit(key, constraints={"gpu": ["A100", "H100"]})
    assert api.submit(key, constraints={"gpu": ["H100", "A100"]}).json["job_id"] == first.json["job_id"]
    assert api.submit(key, constraints={"gpu": "A100"}).status_code == 409
    assert api.submit(key).status_code == 409


@pytest.mark.parametrize(
    "constraints",
    [
        [],
        "gpu",
        7,
        True,
        {"gpu": []},
        {"gpu": None},
        {"gpu": True},
        {"": "x"},
        {"gpu": "a,b"},
        {"gpu\0": "x"},
        {"memory": {"min": 80, "max": 40}},
        {"memory": {"min": "40"}},
        {"memory": {"least": 1}},
        {"memory": {}},
        {f"n{n}": 1 for n in range(21)},
    ],
)
def test_constraints_that_mean_nothing_are_refused(api: Api, constraints: Any) -> None:
    api.model()
    answer = api.submit(constraints=constraints)
    assert (answer.status_code, answer.json["field"]) == (422, "constraints")
    assert "constraints" in answer.json["detail"]
    assert api.stored() == NOTHING


def test_contradictory_constraints_are_refused_with_the_contradiction(api: Api) -> None:
    api.model()
    answer = api.submit(constraints={"memory": {"min": 80, "max": 40}})
    assert answer.json["detail"] == "constraints.memory: no server can be at least 80 and at most 40"


NUMBERS = [pytest.param(b"1" + b"0" * 400, id="long"), b"1e999", b"NaN", b"-Infinity"]


@pytest.mark.parametrize("number", NUMBERS)
def test_no_number_is_endless(api: Api, number: bytes) -> None:
    api.model()
    raw = b'{"model":"zimg","payload":{},"constraints":{"memory":{"min":%s}}}' % number
    answer = api.client.post("/queue/submit", data=raw, content_type="application/json")
    assert answer.status_code == (422 if number[:1] == b"1" else 400)
    assert api.stored() == NOTHING


# -- servers -------------------------------------------------------------------------------------------------------


def test_the_declared_attributes_of_a_server_stay_until_the_next_declaration(api: Api) -> None:
    declared = {"gpu": "A100", "memory": 80, "labels": ["fast", "testnet"]}
    answer = api.register(attributes=declared, weight=2.5).json
    assert (answer["attributes"], answer["weight"]) == (declared, 2.5)
    assert api.register(slots=2).json | {"slots": 1} == answer
    assert api.register(attributes={"gpu": "H100"}, weight=1).json["attributes"] == {"gpu": "H100"}
    assert (_server(api)["attributes"], _server(api)["weight"]) == ({"gpu": "H100"}, 1)


def test_version_and_runtime_are_those_of_the_model_there(api: Api) -> None:
    api.register(model="zimg", model_version="2.1", runtime="trt", attributes={"gpu": "A100"})
    answer = api.register(model="flux", model_version="dev").json
    assert answer["attributes"] == {
        "gpu": "A100",
        "zimg:model_version": "2.1",
        "zimg:runtime": "trt",
        "flux:model_version": "dev",
    }
    api.register(model="zimg", attributes={"gpu": "H100"}, runtime="onnx")
    kept = _server(api)["attributes"]
    assert (kept["zimg:model_version"], kept["zimg:runtime"], kept["gpu"]) == ("2.1", "onnx", "H100")


def test_a_version_is_compared_with_that_of_the_jobs_own_model(api: Api) -> None:
    api.register(model="zimg", slots=4, model_version="2.1", attributes={"model_version": "none"})
    api.register(model="flux", slots=4)
    asked = [("zimg", "2.1"), ("zimg", "none"), ("flux", "2.1"), ("flux", "none")]
    ids = [api.submitted(model=model, constraints={"model_version": version}) for model, version in asked]
    assert [offer.job_id for offer in api.notifications.offers] == [ids[0], ids[3]]


def test_a_model_with_an_unusual_name_can_declare_a_version(api: Api) -> None:
    name = "org/m-7b.v%1+x@y:z".replace("%", "")
    api.register(model=name, model_version="1.0")
    job_id = api.submitted(model=name, constraints={"model_version": "1.0"})
    assert [offer.job_id for offer in api.notifications.offers] == [job_id]


@pytest.mark.parametrize(
    "field, value",
    [
        ("weight", 0),
        ("weight", -1),
        ("weight", 1000.5),
        ("weight", "2"),
        ("weight", True),
        ("attributes", []),
        ("attributes", "gpu"),
        ("attributes", {"gpu": None}),
        ("attributes", {"gpu": {"min": 1}}),
        ("attributes", {"gpu": ""}),
        ("attributes", {"gpu": []}),
        ("attributes", {"gpu": "a\nb"}),
        ("attributes", {"zimg:model_version": "2"}),
        ("attributes", {f"n{n}": 1 for n in range(51)}),
        ("model_version", ""),
        ("model_version", 2),
        ("model_version", "a\nb"),
        ("runtime", "x" * 200),
    ],
)
def test_a_wrong_declaration_is_refused_and_the_server_stays_as_it_was(api: Api, field: str, value: Any) -> None:
    before = api.register(attributes={"gpu": "A100"}, weight=2).json
    answer = api.register(slots=7, **{field: value})
    assert (answer.status_code, answer.json["field"]) == (422, field)
    assert field in answer.json["detail"]
    assert before.items() <= _server(api).items()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("where", [b'"weight":%s', b'"attributes":{"memory":%s}'])
def test_an_endless_weight_or_attribute_is_refused(api: Api, number: bytes, where: bytes) -> None:
    body = b'{"model":"zimg","server":"gpu1","endpoint":"http://127.0.0.1:9/x","slots":1,' + where % number + b"}"
    answer = api.client.post("/admin/register", data=body, content_type="application/json")
    assert answer.status_code == (422 if number[:1] == b"1" else 400)
    assert api.client.get("/admin/servers").json["servers"] == []


# -- how servers stand ---------------------------------------------------------------------------------------------


def test_the_parts_of_a_servers_score_can_be_read(timed_api: TimedApi) -> None:
    api = timed_api
    api.register(slots=2, weight=2)
    api.register(model="flux", slots=2)
    fresh = _server(api)["status"]
    assert (fresh["free"], fresh["taken"], fresh["breaker"], fresh["loaded"]) == (2, 0, "closed", None)
    assert fresh["scores"]["zimg"] == {"load": 0, "failures": 0, "slowness": 0, "swap": 0, "silence": 0, "total": 0.5}
    api.submitted()
    api.run(1000, Reason.SERVER_ERROR)
    api.submitted()
    now = _server(api)["status"]
    assert (now["free"], now["taken"], now["loaded"], now["swaps"]) == (1, 1, "zimg", 0)
    zimg, flux = now["scores"]["zimg"], now["scores"]["flux"]
    assert (zimg["load"], zimg["failures"], zimg["swap"]) == (0.5, 1, 0)
    assert (flux["swap"], flux["total"]) == (1, (1 + 0.5 + 1 + 1) / 2)


@pytest.mark.parametrize("settings", [{"BREAKER_FAILURES": "2", "BREAKER_OPEN_MS": "5000"}])
def test_an_open_breaker_and_a_cooldown_are_shown_with_their_end_times(
    timed_api: TimedApi, settings: dict[str, str]
) -> None:
    api = timed_api
    api.register()
    for _ in range(2):
        api.submitted()
        api.run(1000, Reason.SERVER_ERROR)
    cool_down(api.dispatcher, "zimg", "gpu1")
    status = _server(api)["status"]
    assert (status["breaker"], status["breaker_until"]) == ("open", "2027-01-15T08:00:07.000Z")
    assert (status["cooling"], status["cooldown_until"]) == (1, "2027-01-15T08:00:03.000Z")


def test_the_status_of_a_server_is_null_without_redis(mortal_api: Api) -> None:
    mortal_api.register()
    mortal_api.valkey.kill()
    assert _server(mortal_api)["status"] is None
