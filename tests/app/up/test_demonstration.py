"""The demonstration of `slotkeeper up` on an installation that already has models."""

from typing import Any

from app.up import demonstration
from app.up.plan import DemoServer
from tests.support.api import Api
from tests.support.direct_client import DirectClient

SERVERS = [DemoServer(f"{model}-demo", model, "", 9000 + n) for n, model in enumerate(("zimg", "flux", "trellis"))]


def _register(api: Api) -> set[str]:
    client: Any = DirectClient(api)
    return demonstration.register(client, SERVERS)


def _servers_of(api: Api, model: str) -> list[str]:
    servers: list[str] = api.client.get(f"/admin/models/{model}").json["servers"]
    return servers


def test_a_demo_server_with_a_new_port_is_registered_again(api: Api) -> None:
    assert _register(api) == _register(api) == {"zimg", "flux", "trellis"}
    assert _servers_of(api, "flux") == ["flux-demo"]
    assert api.client.get("/admin/model-configs/flux").json["config"]["model_type"] == "async"


def test_a_model_that_already_has_servers_gets_no_demo_server(api: Api) -> None:
    api.register(model="zimg", server="gpu1")
    assert _register(api) == {"flux", "trellis"}
    assert _servers_of(api, "zimg") == ["gpu1"]


def test_the_configuration_of_a_model_that_exists_is_kept(api: Api) -> None:
    api.client.put("/admin/model-configs/flux", json={"max_retries": 7})
    assert "flux" in _register(api)
    assert api.client.get("/admin/model-configs/flux").json["overrides"] == {"max_retries": 7}


def test_jobs_are_of_the_models_that_have_demo_servers() -> None:
    assert {job["model"] for job in demonstration.mixed_jobs(20, {"zimg", "flux"})} == {"zimg", "flux"}
