"""Scripted servers, and an event loop that speaks to them."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tasks.servers import ServerAdapter
from tests.support.blocking import Blocking, Loop
from tests.support.scripted import Act, Scripted, Seen


@pytest.fixture
def scripted() -> Iterator[Callable[[Callable[[Seen], Act]], Scripted]]:
    """Starts servers that do what they are told, and stops them."""
    with ExitStack() as stack:
        yield lambda act: stack.enter_context(Scripted(act))


@pytest.fixture
def silent_address() -> Iterator[int]:
    """A port of 127.0.0.2 whose queue of connections is full, so that none is made."""
    with ExitStack() as stack:
        port = stack.enter_context(socket.create_server(("127.0.0.2", 0), backlog=0)).getsockname()[1]
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.2", port))
        yield port


@pytest.fixture
def loop() -> Iterator[Loop]:
    with Loop() as found:
        yield found


@pytest.fixture
def ours(loop: Loop) -> Callable[..., Blocking]:
    """Makes a server that is called in an event loop."""
    return lambda *args, **more: Blocking(ServerAdapter(*args, **more), loop)
