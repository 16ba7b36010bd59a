"""Values that exist once in a process, however many threads ask for one at the same moment."""

import threading
from collections.abc import Callable
from functools import update_wrapper
from typing import Generic, TypeVar

T = TypeVar("T")

# One reentrant lock for all: a function that makes a value may ask for other singletons.
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
    """Decorate a function without arguments: see Singleton."""
    return Singleton(make)
