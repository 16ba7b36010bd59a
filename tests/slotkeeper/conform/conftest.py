"""Which server is put to the protocol: the reference server in both modes.  Others: `slotkeeper conform URL`."""

import contextlib
from collections.abc import Iterator

import pytest

from slotkeeper.conform.check_context import CheckContext, ServerUnderTest, wait_until
from slotkeeper.conform.gate import Gate
from slotkeeper.conform.reference import GATED, started


@pytest.fixture(scope="session", params=["sync", "async"])
def served(request: pytest.FixtureRequest) -> Iterator[ServerUnderTest]:
    with started(GATED, "--slots", "2", *(["--async"] if request.param == "async" else [])) as process:
        yield process.served


@pytest.fixture
def harness(served: ServerUnderTest) -> Iterator[CheckContext]:
    """A gate of this test's own; afterwards the server is idle again."""
    with contextlib.closing(Gate()) as gate:
        yield CheckContext(served, gate)
    wait_until(served.is_idle, "an idle server")
