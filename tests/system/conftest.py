"""Real processes for all tests of a session.  Tests break only the second installation; each registers new models."""

import itertools
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, started_cluster
from tests.support.http_api import HttpApi
from tools.cluster.stack import Stack

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    env = {"SLOTKEEPER_WEBHOOK_ALLOW": "127.0.0.1/32"}
    with Stack(tmp_path_factory.mktemp("slotkeeper"), env) as running:
        running.maintenance()
        running.webhooks()
        running.beat()
        running.worker()
        running.web()
        yield running


@pytest.fixture(scope="session")
def api(stack: Stack) -> HttpApi:
    return HttpApi(stack)


@pytest.fixture
def server_name() -> str:
    return f"e2e-api{next(_numbers)}"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An installation with beat, maintenance and the API; each test registers new models."""
    with started_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running
