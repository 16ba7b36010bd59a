"""Removing and renaming models and servers, by the door."""

import pytest

from tests.support.api import Api
from upkeep.reconcile import departures


def test_a_model_with_jobs_is_refused_with_what_is_in_the_way(api: Api) -> None:
    api.register()
    api.submitted()
    answer = api.client.delete("/admin/models/zimg")
    assert (answer.status_code, answer.json["code"], answer.json["queued"]) == (409, "conflict", 1)
    assert "1 queued" in answer.json["detail"] and "drain=true" in answer.json["detail"]


def test_a_model_without_jobs_is_removed_at_once(api: Api) -> None:
    api.register()
    answer = api.client.delete("/admin/models/zimg")
    assert (answer.status_code, answer.json["state"], answer.json["idle"]) == (200, "done", ["gpu1"])
    assert api.client.get("/admin/models/zimg").status_code == 404
    assert api.client.delete("/admin/models/zimg").status_code == 404
    assert api.submit().status_code == 422


def test_a_removal_can_be_watched_and_called_off(api: Api) -> None:
    api.register()
    job_id = api.submitted()
    answer = api.client.delete("/admin/models/zimg", query_string={"drain": "true"})
    assert (answer.status_code, answer.json["state"], answer.json["left"]) == (202, "leaving", {"queued": 1})
    shown = api.client.get("/admin/models/zimg").json["leaving"]
    assert (shown["left"], shown["becomes"], shown["by"]) == ({"queued": 1}, None, "default")
    assert api.client.get("/admin/models").json["models"][0]["leaving"]["left"] is None
    refused = api.submit()
    assert (refused.status_code, refused.json["code"]) == (409, "model_closed")
    assert api.client.delete("/admin/models/zimg/removal").json["leaving"] is None
    assert api.client.delete("/admin/models/zimg/removal").status_code == 404
    assert api.submit().status_code == 202
    assert api.client.get(f"/queue/jobs/{job_id}").json["status"] == "queued"


def test_a_drained_model_goes_and_its_ended_jobs_stay_readable(api: Api) -> None:
    api.model()
    job_id = api.submitted()
    api.client.delete("/admin/models/zimg?drain=true")
    api.client.post(f"/queue/jobs/{job_id}/cancel")
    assert [it.name for it in departures.go_on(api.dispatcher)] == ["zimg"]
    assert api.client.get("/admin/models").json["models"] == []
    assert api.client.get(f"/queue/jobs/{job_id}").json["model"] == "zimg"
    listed = api.client.get("/queue/jobs", query_string={"model": "zimg"}).json["jobs"]
    assert [job["job_id"] for job in listed] == [job_id]


def test_a_model_is_renamed_while_its_jobs_wait(api: Api) -> None:
    api.register()
    ids = [api.submitted(), api.submitted()]
    answer = api.client.post("/admin/models/zimg/rename", json={"to": "flux/dev", "former_name_s": None})
    assert answer.status_code == 200
    assert answer.json["former_names"] == [{"name": "zimg", "until": None}]
    assert [api.client.get(f"/queue/jobs/{job_id}").json["model"] for job_id in ids] == ["flux/dev"] * 2
    by_former_name = api.submit()
    assert (by_former_name.status_code, by_former_name.json["position"]) == (202, 2)
    assert api.client.delete("/admin/models/flux/dev/former-names/zimg").status_code == 204
    refused = api.submit()
    assert refused.status_code == 422 and "flux/dev" in refused.json["detail"]


@pytest.mark.parametrize("body", [{}, {"to": "-x"}, {"to": "a", "former_name_s": -1}, {"to": "a", "x": 1}])
def test_a_name_that_is_none_is_refused_with_its_field(api: Api, body: dict[str, object]) -> None:
    api.register()
    assert api.client.post("/admin/models/zimg/rename", json=body).status_code == 422
    assert [it["model"] for it in api.client.get("/admin/models").json["models"]] == ["zimg"]


def test_a_name_that_is_taken_is_refused(api: Api) -> None:
    api.register()
    api.register(model="flux", server="gpu2")
    assert api.client.post("/admin/models/zimg/rename", json={"to": "flux"}).status_code == 409
    assert api.client.post("/admin/servers/gpu1/rename", json={"to": "gpu2"}).status_code == 409


def test_an_idle_server_is_renamed_at_once_and_a_busy_one_later(api: Api) -> None:
    api.register()
    answer = api.client.post("/admin/servers/gpu1/rename", json={"to": "gpu2"})
    assert (answer.status_code, answer.json["name"], answer.json["state"]) == (200, "gpu2", "done")
    task = api.started()
    answer = api.client.post("/admin/servers/gpu2/rename", json={"to": "gpu3"})
    assert (answer.status_code, answer.json["left"]) == (202, {"running": 1})
    (server,) = api.client.get("/admin/servers").json["servers"]
    assert (server["server"], server["formerly"], server["leaving"]["becomes"]) == ("gpu2", "gpu1", "gpu3")
    assert api.client.delete("/admin/servers/gpu2/removal").json["leaving"] is None
    assert api.client.delete("/admin/servers/gpu2/removal").status_code == 404
    assert task.run.server == "gpu2"


def test_a_busy_server_is_refused_drained_or_removed_by_force(api: Api) -> None:
    api.register()
    job_id = api.started().run.job.id
    assert api.client.delete("/admin/servers/gpu1").status_code == 409
    assert api.client.delete("/admin/servers/gpu1?drain=true").status_code == 202
    answer = api.client.delete("/admin/servers/gpu1?force=true")
    assert (answer.status_code, answer.json["lost"]) == (200, [job_id])
    job = api.client.get(f"/queue/jobs/{job_id}").json
    assert (job["status"], job["why"], job["crashes"]) == ("queued", "server_unreachable", 0)


def test_a_server_that_serves_many_models_speaks_to_each_in_its_own_way(api: Api) -> None:
    """Each has an endpoint, a version and a description of its own, and all share the slots."""
    for model, own in (("zimg", None), ("flux", {"mode": "async"}), ("llm", {"mode": "sync"})):
        body = {"model": model, "endpoint": f"http://gpu1:9000/{model}", "model_version": f"{model}-1", "slots": 2}
        assert api.register(**body, **({} if own is None else {"description": own})).status_code == 201
    (server,) = api.client.get("/admin/servers").json["servers"]
    assert server["models"] == {model: f"http://gpu1:9000/{model}" for model in ("zimg", "flux", "llm")}
    modes = {model: own["description"] for model, own in server["described"].items()}
    assert modes == {"flux": {"mode": "async"}, "llm": {"mode": "sync"}}
    found = api.dispatcher.catalog.refresh()
    versions = {model: found.described_by("gpu1", model) for model in ("zimg", "flux", "llm")}
    assert versions["zimg"] is None and len(set(versions.values())) == 3
    ids = [api.submitted(model=model) for model in ("llm", "zimg", "flux")]
    offered = [offer.job_id for offer in api.heard.offers]
    assert offered == ids[:2], "two slots for all of them"
    api.client.delete("/admin/models/llm?drain=true")
    assert api.client.delete("/admin/models/flux").status_code == 409
    assert api.client.post("/admin/models/zimg/rename", json={"to": "zimg-2"}).status_code == 200
    (server,) = api.client.get("/admin/servers").json["servers"]
    assert sorted(server["models"]) == ["flux", "llm", "zimg-2"]
    assert server["attributes"]["zimg-2:model_version"] == "zimg-1"
