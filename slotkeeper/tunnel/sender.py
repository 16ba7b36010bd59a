"""Sends the messages of a tunnel over its WebSocket."""

import asyncio
from collections.abc import Awaitable, Callable

from slotkeeper.tunnel.streams import Tunnel


class Sender:
    """Sends the messages of a tunnel one after the other, so that urgent frames pass waiting bodies.

    It has a task only while there is something to send: a gateway has thousands of connections that are idle.
    send: sends one message, and returns when the transport has room for the next one.  If it raises, nothing more is
    sent: the reader of the connection gets the same error.
    """

    def __init__(self, tunnel: Tunnel, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._tunnel, self._send = tunnel, send
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def wake(self) -> None:
        """Send what the tunnel has by now.  For the event loop's thread."""
        if self._task is None and not self._is_closed:
            self._task = asyncio.ensure_future(self._send_all())

    async def send_body(self, stream: int, data: bytes, window_opened: asyncio.Event) -> None:
        """Send a part of a body, and return when the stream's window has admitted all of it, or the stream is over.

        window_opened: is set after each WindowOpened of the stream, and when it is over.
        """
        while data:
            window_opened.clear()
            sent = self._tunnel.send(stream, data)
            data = data[sent:]
            self.wake()
            if not sent:
                await window_opened.wait()

    def close(self) -> None:
        """Send nothing more."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()

    async def _send_all(self) -> None:
        try:
            while (message := self._tunnel.next_message()) is not None:
                await self._send(message)
        except Exception:
            self._is_closed = True
        finally:
            self._task = None
