"""Which server is put to the protocol: the reference server in both modes.  Others: `slotkeeper conform URL`."""

import contextlib
from collections.abc import Iterator

import pytest

from slotkeeper.conform.gate import Gate
from slotkeeper.conform.reference import GATED, started
from slotkeeper.conform.stage import Served, Stage, until


@pytest.fixture(scope="session", params=["sync", "async"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with started(GATED, "--slots", "2", *(["--async"] if request.param == "async" else [])) as process:
        yield process.served


@pytest.fixture
def stage(served: Served) -> Iterator[Stage]:
    """A gate of this test's own; afterwards the server is idle again."""
    with contextlib.closing(Gate()) as gate:
        yield Stage(served, gate)
    until(served.is_idle, "an idle server")
