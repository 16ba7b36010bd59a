"""`slotkeeper conform` through a gateway: a node keeps the slot protocol."""

import json
import subprocess

import pytest

from tests.support.home_node import Gateway, HomeNode
from tests.support.http_api import HttpApi
from tests.support.installation import SLOTKEEPER
from tools.cluster.stack import REPO

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_conform_passes_through_a_gateway(api: HttpApi, gateway: Gateway) -> None:
    HomeNode(api, "attic", gateway.port, slots=2, gated={"function": "slotkeeper.serve.gated:model"}).started()
    report = json.loads(api.stack.run([SLOTKEEPER, "conform", "--node", "attic", "--json"]))
    skipped = {check["check"] for check in report["checks"] if check["ended"] == "skipped"}
    assert report["counts"]["failed"] == 0 and len(skipped) == 10, report


def test_a_node_that_is_not_connected_or_unknown_cannot_be_checked(api: HttpApi, gateway: Gateway) -> None:
    HomeNode(api, "attic", gateway.port)
    for name, why in (("attic", "is not connected"), ("cellar", "There is no such node")):
        command = [SLOTKEEPER, "conform", "--node", name]
        ended = subprocess.run(command, env=api.stack.env, cwd=REPO, check=False, capture_output=True, text=True)
        assert ended.returncode != 0 and why in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr
