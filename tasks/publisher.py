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

_MAX_PENDING = 10_000
_EXIT_FLUSH_S = 2.0


class Publisher:
    """A line of messages to send, and the thread that sends them one after another."""

    def __init__(self, max_pending: int = _MAX_PENDING) -> None:
        self._queue: Queue[Callable[[], object]] = Queue(max_pending)
        self._idle = threading.Condition()
        self._pending_count = 0
        self._thread = threading.Thread(target=self._send_all, name="publisher", daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], object]) -> None:
        """Have `send` called in a moment; what it raises is logged.  Dropped if too many wait already."""
        with self._idle:
            self._pending_count += 1
        try:
            self._queue.put_nowait(send)
        except Full:
            self._note_done()
            log.warning("message_dropped", waiting=self._queue.maxsize)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is sent that has been handed in; False: it took longer."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending_count == 0, timeout_s)

    def _send_all(self) -> None:
        while True:
            send = self._queue.get()
            try:
                send()
            except Exception as error:
                log.warning("message_not_sent", error=str(error))
            finally:
                self._note_done()

    def _note_done(self) -> None:
        with self._idle:
            self._pending_count -= 1
            self._idle.notify_all()


@singleton
def publish_queue() -> Publisher:
    """The process's Publisher, made on first use; before the process ends, it has a moment to send what is left."""
    publisher = Publisher()
    atexit.register(publisher.flush, _EXIT_FLUSH_S)
    return publisher
