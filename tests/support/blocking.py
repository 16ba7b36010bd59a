"""Servers that a test calls from its own thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self

from tasks.servers import HttpClient, ServerAdapter, ServerSession, call_server


class Loop:
    """An event loop in a separate thread, with an HTTP client.  Use as a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.http = HttpClient(self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def wait_for(self, act: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(act, self._loop).result(60)

    def soon(self, act: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(act)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self.http.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


class Blocking:
    """A ServerAdapter whose calls block until the response: in `loop`, or each in a new loop."""

    def __init__(self, server: ServerAdapter, loop: Loop | None = None) -> None:
        self.server, self.loop = server, loop

    def __getattr__(self, name: str) -> Any:
        if name not in ("submit", "status", "cancel", "health", "result"):
            return getattr(self.server, name)
        return lambda *args: self._call(lambda live: getattr(live, name)(*args))

    def _call(self, act: Callable[[ServerSession], Coroutine[Any, Any, Any]]) -> Any:
        if self.loop is None:
            return call_server(self.server, act)
        return self.loop.wait_for(act(ServerSession(self.server, self.loop.http)))
