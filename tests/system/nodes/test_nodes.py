"""Nodes through real processes: from the token to the result, through cuts, restarts and lies."""

import pytest

from tests.support.home_node import Gateway, HomeNode
from tests.support.http_api import HttpApi

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def _serve(api: HttpApi, model: str = "zimg", **config: object) -> None:
    answer = api.call(
        "PUT", f"/admin/model-configs/{model}", json={"node_pools": ["homes"], "poll_interval": 0.2, **config}
    )
    assert answer.ok, answer.text


def test_a_job_runs_on_a_node_that_no_worker_can_reach(api: HttpApi, gateway: Gateway) -> None:
    _serve(api)
    HomeNode(api, "attic", gateway.port).started()

    job = api.ended(api.submit("zimg", {"prompt": "a cat", "seconds": 0.2}))

    assert (job["status"], job["server"]) == ("completed", "attic"), job
