"""The ASGI application behind uvicorn, on a free port and in a thread."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
import uvloop

from app.listening import listen
from app.server.__main__ import configuration, serve
from app.server.application import WebApplication
from app.server.http_protocol import LimitedHttpProtocol
from tools.cluster.stack import eventually


@dataclass
class Web:
    """One that serves."""

    application: WebApplication
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> tuple[str, int]:
        found: tuple[str, int] = self.server.servers[0].sockets[0].getsockname()
        return found

    @property
    def connections(self) -> list[LimitedHttpProtocol]:
        return self.application.limits.connections()

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """In the event loop's thread."""
        self.loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """Begin to stop, as a signal does."""
        self.server.should_exit = True


@contextmanager
def serving(application: WebApplication) -> Iterator[Web]:
    config = configuration(application, application.settings)
    config.timeout_graceful_shutdown = 1
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        web = Web(application, uvicorn.Server(config), runner.get_loop())
        thread = threading.Thread(
            target=runner.run, args=(serve(application, web.server, listen("127.0.0.1", 0, "The API", "")),)
        )
        thread.start()
        try:
            eventually(lambda: web.server.started, "it listens", every_s=0.01)
            yield web
        finally:
            web.stop()
            thread.join()
