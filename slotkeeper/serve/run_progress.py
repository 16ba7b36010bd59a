"""The progress stream of a run: pieces of its result and progress reports."""

import threading
from collections.abc import Iterator
from typing import Any

from slotkeeper.serve.exact import dumps


class RunProgress:
    """The messages of one run, each as JSON text.

    It keeps all messages, so that a client that joins the run later receives the stream from its beginning.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[bytes] = []
        self._has_ended = False
        self.progress: Any = None

    def say(self, **message: Any) -> None:
        """Append the message `piece=…` or `progress=…`.  Raises NotJsonSerializable."""
        encoded = dumps(message)
        with self._changed:
            self.progress = message.get("progress", self.progress)
            self._messages.append(encoded)
            self._changed.notify_all()

    def end(self) -> None:
        """End the stream.  Iterators stop after the last message."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        """Yield all messages from the first one on, and wait for further ones until the stream ends."""
        sent = 0
        while True:
            new, has_ended = self.wait_for_more(sent, None)
            yield from new
            sent += len(new)
            if has_ended:
                return

    def wait_for_more(self, sent: int, timeout_s: float | None) -> tuple[list[bytes], bool]:
        """Wait for messages after the first `sent`, or for the end; return them, and whether the stream has ended.

        timeout_s: return nothing after this time; None: wait without limit.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or len(self._messages) > sent, timeout_s)
            return self._messages[sent:], self._has_ended
