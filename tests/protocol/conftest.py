"""Which server is put to the protocol: the reference server in both modes, or a foreign one.

    pytest tests/protocol --server-url http://127.0.0.1:9001 --server-mode async --server-without cancel,ids
    SLOTKEEPER_PROTOCOL_SERVER_URL=http://127.0.0.1:9001 pytest tests

The foreign server must be idle and wrap the model that gates.py describes.
"""

import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.protocol.gates import Gate
from tests.protocol.support import Served, Stage, process, until

OPTIONS = {
    "server-url": ("", "a server to be put to the slot protocol; by default the reference server is started"),
    "server-mode": ("sync", "sync or async"),
    "server-endpoint": ("/generate", "path of the model"),
    "server-direct-queue": ("10", "direct calls that may wait there"),
    "server-without": ("", "what it does not promise: any of cancel, idempotency, ids, separated by commas"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("slot protocol")
    for name, (default, text) in OPTIONS.items():
        group.addoption(f"--{name}", default=None, help=f"{text} (or {_variable(name)}; default {default!r})")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "served" in metafunc.fixturenames:
        modes = (
            [_option(metafunc.config, "server-mode")] if _option(metafunc.config, "server-url") else ["sync", "async"]
        )
        metafunc.parametrize("served", modes, indirect=True, scope="session")


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    config = request.config
    url = _option(config, "server-url")
    if url:
        yield Served(
            url.rstrip("/"),
            request.param,
            _option(config, "server-endpoint"),
            int(_option(config, "server-direct-queue")),
            frozenset(_option(config, "server-without").split(",")),
        )
        return
    with process(
        "tests.protocol.gates:model", "--slots", "2", *(["--async"] if request.param == "async" else [])
    ) as started:
        yield started.served


@pytest.fixture
def stage(served: Served) -> Iterator[Stage]:
    """A gate of this test's own; afterwards the server is idle again."""
    with contextlib.closing(Gate()) as gate:
        yield Stage(served, gate)
    until(lambda: (now := served.health())["active_jobs"] == 0 and now["direct_queue"] == 0, "an idle server")


def _option(config: pytest.Config, name: str) -> str:
    """The command line, else the environment, else the default.

    pytest knows the options of a conftest below the root only when this folder is named on the command line.
    """
    given = getattr(config.option, name.replace("-", "_"), None)
    return given if given is not None else os.environ.get(_variable(name), OPTIONS[name][0])


def _variable(name: str) -> str:
    return "SLOTKEEPER_PROTOCOL_" + name.upper().replace("-", "_")
