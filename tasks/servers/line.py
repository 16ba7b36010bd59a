"""A line to a server, which another thread can cut."""

import socket
import threading
from contextlib import suppress


class Line:
    """The connection of one exchange.  Cut, it ends the waiting for an answer that nobody wants any more.

    What the server makes of that is its own affair: some give the run up, most go on with it.
    """

    def __init__(self) -> None:
        self.is_cut = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def use(self, connection: socket.socket) -> None:
        """Something is about to be sent on this connection.  Raises ConnectionAbortedError if the line is cut."""
        with self._lock:
            if self.is_cut:
                raise ConnectionAbortedError("nobody waits for the answer any more")
            self._socket = connection

    def drop(self) -> None:
        """The exchange is over: its connection may be kept for others."""
        with self._lock:
            self._socket = None

    def cut(self) -> None:
        with self._lock:
            self.is_cut = True
            if self._socket is not None:
                with suppress(OSError):
                    # Not the method of an encrypted socket, which another thread may be reading from just now.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
