"""What a run says while it is at it: pieces of its result, and how far it is."""

import threading
from collections.abc import Iterator
from typing import Any

from slotkeeper.serve.exact import dumps


class RunProgress:
    """Of one run, each as a JSON text; kept until its end, so that whoever joins it hears all of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._said: list[bytes] = []
        self._is_over = False
        self.progress: Any = None

    def say(self, **what: Any) -> None:
        """`piece=…` or `progress=…`.  Raises Unwritable for what is no JSON."""
        text = dumps(what)
        with self._changed:
            self.progress = what.get("progress", self.progress)
            self._said.append(text)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        """From the first on, as they come, until the end."""
        at = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or len(self._said) > at)  # noqa: B023
                fresh, is_over = self._said[at:], self._is_over
            yield from fresh
            at += len(fresh)
            if is_over:
                return
