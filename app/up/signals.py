"""Signals as bytes on a socket: no signal is lost, and no signal interrupts other code."""

import signal
import socket
from types import TracebackType
from typing import Self

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDLED = (*STOPPING, signal.SIGCHLD)


class Signals:
    """While entered: each SIGINT, SIGTERM, SIGHUP and SIGCHLD of this process can be read here.

    The system may deliver a signal to any thread, and a Python handler runs only when the main thread wakes up.  So a
    wait that has just begun would miss the signal.  The interpreter writes the byte at once, and that wakes the select
    of the main thread.
    """

    def __enter__(self) -> Self:
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        self._former_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        # With nohup the process must outlive its terminal.  A shell that starts it with & ignores SIGINT for it; it is
        # handled nevertheless, since a SIGINT is then sent to this process on purpose.
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [number for number in _HANDLED if not (nohup and number == signal.SIGHUP)]
        self._former_handlers = {number: signal.signal(number, lambda *_: None) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._read_end.close()
        self._write_end.close()

    def fileno(self) -> int:
        return self._read_end.fileno()

    def read(self) -> set[int]:
        """Return the signals that have arrived since the last call."""
        try:
            return set(self._read_end.recv(4096))
        except BlockingIOError:
            return set()
