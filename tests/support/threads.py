"""A system that has no thread left."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn
from unittest import mock


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Meanwhile no thread can be started."""

    def start(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with mock.patch.object(threading.Thread, "start", start):
        yield
