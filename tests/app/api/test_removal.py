"""Removing models and servers over the REST API."""

from routing.maintenance import decommission
from tests.support.api import Api


def test_the_removal_of_a_model_with_jobs_is_refused_with_their_number(api: Api) -> None:
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
    assert (answer.status_code, answer.json["state"], answer.json["remaining"]) == (202, "leaving", {"queued": 1})
    shown = api.client.get("/admin/models/zimg").json["removal"]
    assert (shown["remaining"], shown["by"]) == ({"queued": 1}, "default")
    assert api.client.get("/admin/models").json["models"][0]["removal"]["remaining"] is None
    refused = api.submit()
    assert (refused.status_code, refused.json["code"]) == (409, "model_closed")
    assert api.client.delete("/admin/models/zimg/removal").json["removal"] is None
    assert api.client.delete("/admin/models/zimg/removal").status_code == 404
    assert api.submit().status_code == 202
    assert api.client.get(f"/queue/jobs/{job_id}").json["status"] == "queued"


def test_a_drained_model_is_removed_and_its_ended_jobs_stay_readable(api: Api) -> None:
    api.model()
    job_id = api.submitted()
    api.client.delete("/admin/models/zimg?drain=true")
    api.client.post(f"/queue/jobs/{job_id}/cancel")
    assert [removal.name for removal in decommission.finish_removals(api.dispatcher)] == ["zimg"]
    assert api.client.get("/admin/models").json["models"] == []
    assert api.client.get(f"/queue/jobs/{job_id}").json["model"] == "zimg"
    listed = api.client.get("/queue/jobs", query_string={"model": "zimg"}).json["jobs"]
    assert [job["job_id"] for job in listed] == [job_id]


def test_the_removal_of_a_busy_server_is_called_off_once(api: Api) -> None:
    api.register()
    api.started()
    answer = api.client.delete("/admin/servers/gpu1?drain=true")
    assert (answer.status_code, answer.json["remaining"]) == (202, {"running": 1})
    assert api.client.get("/admin/servers").json["servers"][0]["removal"]["by"] == "default"
    assert api.client.delete("/admin/servers/gpu1/removal").json["removal"] is None
    assert api.client.delete("/admin/servers/gpu1/removal").status_code == 404


def test_a_busy_server_is_refused_drained_or_removed_by_force(api: Api) -> None:
    api.register()
    job_id = api.started().run.job.id
    assert api.client.delete("/admin/servers/gpu1").status_code == 409
    assert api.client.delete("/admin/servers/gpu1?drain=true").status_code == 202
    answer = api.client.delete("/admin/servers/gpu1?force=true")
    assert (answer.status_code, answer.json["lost"]) == (200, [job_id])
    job = api.client.get(f"/queue/jobs/{job_id}").json
    assert (job["status"], job["why"], job["crashes"]) == ("queued", "server_unreachable", 0)


def test_a_server_of_many_models_has_a_description_for_each_model(api: Api) -> None:
    """Each model has a separate endpoint, version and description; all models share the slots."""
    for model, own in (("zimg", None), ("flux", {"mode": "async"}), ("llm", {"mode": "sync"})):
        body = {"model": model, "endpoint": f"http://gpu1:9000/{model}", "model_version": f"{model}-1", "slots": 2}
        assert api.register(**body, **({} if own is None else {"description": own})).status_code == 201
    (server,) = api.client.get("/admin/servers").json["servers"]
    assert server["models"] == {model: f"http://gpu1:9000/{model}" for model in ("zimg", "flux", "llm")}
    modes = {model: own["description"] for model, own in server["described"].items()}
    assert modes == {"flux": {"mode": "async"}, "llm": {"mode": "sync"}}
    found = api.dispatcher.catalog.refresh()
    versions = {model: found.find_description("gpu1", model) for model in ("zimg", "flux", "llm")}
    assert versions["zimg"] is None and len(set(versions.values())) == 3
    ids = [api.submitted(model=model) for model in ("llm", "zimg", "flux")]
    offered = [offer.job_id for offer in api.notifications.offers]
    assert offered == ids[:2], "two slots for all of them"
    api.client.delete("/admin/models/llm?drain=true")
    assert api.client.delete("/admin/models/flux").status_code == 409
