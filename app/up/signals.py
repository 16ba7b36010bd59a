"""Signals as bytes on a socket: none is lost, and none interrupts anything half-way."""

import signal
import socket
from types import TracebackType
from typing import Self

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDLED = (*STOPPING, signal.SIGCHLD)


class Signals:
    """While entered: each SIGINT, SIGTERM, SIGHUP and SIGCHLD of this process can be read here.

    The system may hand a signal to any thread, and a handler in Python runs only once the main thread wakes up,
    so a wait that began a moment before would sleep through it.  The byte is written at once, by the interpreter
    itself, and wakes the select that waits for it.
    """

    def __enter__(self) -> Self:
        self._read, self._written = socket.socketpair()
        self._read.setblocking(False)
        self._written.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        # Started by nohup, it shall survive its terminal.  SIGINT is heard even where a script has started us with &
        # and so had it ignored: whoever sends it means us.
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = [number for number in _HANDLED if not (nohup and number == signal.SIGHUP)]
        self._before = {number: signal.signal(number, lambda *_: None) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._read.close()
        self._written.close()

    def fileno(self) -> int:
        return self._read.fileno()

    def read(self) -> set[int]:
        """The signals that have come since the last look."""
        try:
            return set(self._read.recv(4096))
        except BlockingIOError:
            return set()
