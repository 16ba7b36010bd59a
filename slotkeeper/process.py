"""A value that is made once in a process, however many threads ask for it at the same moment."""

import threading
from collections.abc import Callable
from functools import update_wrapper
from typing import Generic, TypeVar

T = TypeVar("T")

# One lock for all: what is made here may ask for other such values, from the same thread.
_lock = threading.RLock()


class Singleton(Generic[T]):
    """`functools.cache` for a function without arguments, but it never runs twice."""

    def __init__(self, make: Callable[[], T]) -> None:
        update_wrapper(self, make)
        self._make = make
        self._made: list[T] = []

    def __call__(self) -> T:
        if not self._made:
            with _lock:
                if not self._made:
                    self._made.append(self._make())
        return self._made[0]

    @property
    def created(self) -> bool:
        return bool(self._made)

    def cache_clear(self) -> None:
        """Forget the value, as tests do between two installations."""
        self._made.clear()


def singleton(make: Callable[[], T]) -> Singleton[T]:
    """Decorator: see Once."""
    return Singleton(make)
