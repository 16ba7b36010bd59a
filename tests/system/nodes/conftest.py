"""One Slotkeeper with a gateway for each test of nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.home_node import Gateway
from tests.support.http_api import HttpApi
from tools.cluster.stack import Stack


@pytest.fixture
def api(tmp_path: Path) -> Iterator[HttpApi]:
    with Stack(tmp_path, {"SLOTKEEPER_CATALOG_REFRESH_S": "0.5"}) as stack:
        stack.maintenance("maintenance", "--embedded-beat")
        stack.worker()
        stack.web()
        yield HttpApi(stack)


@pytest.fixture
def gateway(api: HttpApi) -> Gateway:
    return Gateway(api.stack)
