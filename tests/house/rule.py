"""One test for one rule, however many files or scripts it holds for."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TypeVar

T = TypeVar("T")


def for_each(things: Iterable[T]) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """Make a check of one thing a test of all of them, which fails once and lists every violation."""

    def decorate(check: Callable[[T], None]) -> Callable[[], None]:
        @wraps(check)
        def test() -> None:
            violations = []
            for thing in things:
                try:
                    check(thing)
                except AssertionError as error:
                    violations.append(f"{thing}: {error}")
            assert not violations, "\n\n".join(violations)

        del test.__wrapped__  # type: ignore[attr-defined]  # pytest would read the check's signature
        return test

    return decorate
