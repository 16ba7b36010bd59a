"""Sends messages in a thread of its own, so that nobody waits for a broker that is slow, silent or away.

A message that is dropped costs a moment: workers look for open offers by themselves, and what is owed to clients stands
in the record.
"""

import atexit
import threading
from collections.abc import Callable
from queue import Full, Queue

import structlog

from slotkeeper.process import singleton

log = structlog.get_logger(__name__)

_MOST_WAITING = 10_000
_LAST_WORDS_S = 2.0


class Publisher:
    """A line of messages to send, and the thread that sends them one after another."""

    def __init__(self, most_waiting: int = _MOST_WAITING) -> None:
        self._line: Queue[Callable[[], object]] = Queue(most_waiting)
        self._empty = threading.Condition()
        self._unsent = 0
        self._thread = threading.Thread(target=self._send_all, name="publisher", daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], object]) -> None:
        """Have `send` called in a moment; what it raises is logged.  Dropped if too many wait already."""
        with self._empty:
            self._unsent += 1
        try:
            self._line.put_nowait(send)
        except Full:
            self._note_done()
            log.warning("message_dropped", waiting=self._line.maxsize)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is sent that has been handed in; False: it took longer."""
        with self._empty:
            return self._empty.wait_for(lambda: self._unsent == 0, timeout_s)

    def _send_all(self) -> None:
        while True:
            send = self._line.get()
            try:
                send()
            except Exception as error:
                log.warning("message_not_sent", error=str(error))
            finally:
                self._note_done()

    def _note_done(self) -> None:
        with self._empty:
            self._unsent -= 1
            self._empty.notify_all()


@singleton
def publish_queue() -> Publisher:
    """The process's Publisher, made on first use; before the process ends, it has a moment to send what is left."""
    made = Publisher()
    atexit.register(made.flush, _LAST_WORDS_S)
    return made
