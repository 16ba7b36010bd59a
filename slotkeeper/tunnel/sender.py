"""Sends the messages of a tunnel over its WebSocket."""

import asyncio
from collections.abc import Awaitable, Callable

from slotkeeper.tunnel.streams import Tunnel


class Sender:
    """Sends the messages of a tunnel one after the other, so that urgent frames pass waiting bodies.

    send: sends one message, and returns when the transport has room for the next one.
    """

    def __init__(self, tunnel: Tunnel, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._tunnel, self._send = tunnel, send
        self._work = asyncio.Event()

    def wake(self) -> None:
        """Send what the tunnel has by now.  For the event loop's thread."""
        self._work.set()

    async def run(self) -> None:
        """Send until it is canceled.  Raises what `send` raises."""
        while True:
            await self._work.wait()
            self._work.clear()
            while (message := self._tunnel.next_message()) is not None:
                await self._send(message)
