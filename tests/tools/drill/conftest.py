from collections.abc import Iterator

import pytest

from tests.tools.drill.sockets import Listener
from tools.cluster.tcp_proxy import Proxy


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(seed=7) as proxy:
        yield proxy


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()
