"""Scripted servers, and the two ways to speak to one: in the calling thread, and in an event loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import requests

from tasks.servers import Live, Server, Wires, new_session
from tests.support.scripted import Act, Scripted, Seen


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with new_session(pool_size=4) as session:
        yield session


@pytest.fixture
def scripted() -> Iterator[Callable[[Callable[[Seen], Act]], Scripted]]:
    """Starts servers that do what they are told, and stops them."""
    with ExitStack() as stack:
        yield lambda act: stack.enter_context(Scripted(act))


class Loop:
    """An event loop in a thread of its own, with its wires."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.wires = Wires(self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def wait_for(self, act: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(act, self._loop).result(60)

    def soon(self, act: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(act)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self.wires.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture
def loop() -> Iterator[Loop]:
    found = Loop()
    yield found
    found.close()


class Through:
    """A Server that is spoken to in an event loop, with a face like one that is not."""

    def __init__(self, server: Server, loop: Loop) -> None:
        self.server, self.loop = server, loop

    def __getattr__(self, name: str) -> Any:
        if name not in ("submit", "status", "cancel", "health"):
            return getattr(self.server, name)
        return lambda *args: self.loop.wait_for(getattr(Live(self.server, self.loop.wires), name)(*args))


@pytest.fixture(params=["in a thread", "in a loop"])
def ours(request: pytest.FixtureRequest, session: requests.Session) -> Callable[..., Any]:
    """Makes a server that is spoken to in one of the two ways."""
    if request.param == "in a thread":
        return lambda *args, **more: Server(*args, session=session, **more)
    loop = request.getfixturevalue("loop")
    return lambda *args, **more: Through(Server(*args, **more), loop)
