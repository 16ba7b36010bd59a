"""Scripted HTTP servers, and an event loop that calls them."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tasks.servers import ServerAdapter
from tests.support.blocking import Blocking, Loop
from tests.support.scripted import Act, Scripted, Seen


@pytest.fixture
def scripted() -> Iterator[Callable[[Callable[[Seen], Act]], Scripted]]:
    """Return a function that starts a server with scripted responses.  All are stopped after the test."""
    with ExitStack() as stack:
        yield lambda act: stack.enter_context(Scripted(act))


@pytest.fixture
def silent_address() -> Iterator[int]:
    """Return a port of 127.0.0.2 whose accept queue is full, so that no connection is established."""
    with ExitStack() as stack:
        port = stack.enter_context(socket.create_server(("127.0.0.2", 0), backlog=0)).getsockname()[1]
        for _ in range(4):
            queued = stack.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(("127.0.0.2", port))
        yield port


@pytest.fixture
def loop() -> Iterator[Loop]:
    with Loop() as running:
        yield running


@pytest.fixture
def ours(loop: Loop) -> Callable[..., Blocking]:
    """Return a function that creates a server adapter, which is called in an event loop."""
    return lambda *args, **more: Blocking(ServerAdapter(*args, **more), loop)
