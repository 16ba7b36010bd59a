"""What a process has once: singletons, garbage collection, the id of the machine's boot."""

import gc
import threading
from collections.abc import Callable
from functools import cache, update_wrapper
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

# One reentrant lock for all: a function that makes a value may ask for other singletons.
_lock = threading.RLock()
_COLLECT_AFTER = 20_000  # new objects
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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


@singleton
def tune_garbage_collection() -> None:
    """Exclude what has been imported from garbage collection, and collect the rest less often.

    A collection stops all threads and visits every object that is not frozen.  Call once, when the imports are done:
    garbage that exists by then is never freed.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


@cache
def package_version() -> str:
    """Return the version of the installed package; "0": it runs from a checkout that is not installed."""
    try:
        return version("slotkeeper")
    except PackageNotFoundError:
        return "0"


@cache
def read_boot_id() -> str:
    """Return the kernel's id of this boot of the machine, or "" if it has none (macOS)."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""
