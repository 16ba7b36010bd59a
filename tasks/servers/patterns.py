"""Regular expressions with bounded search time.

The server chooses the text that is searched, and a search blocks every thread of the worker.  RE2 searches in linear
time for every pattern, and the size of a pattern's program is limited.
"""

from collections.abc import Iterable

import re2

TEXT_LIMIT = 2048  # characters searched
MAX_LENGTH = 200  # characters of a pattern
MAX_PROGRAM = 1_000  # instructions of a pattern's program; each takes at most 20 us on the longest text
MAX_PROGRAMS = 5_000  # instructions of all patterns of a step: 0.1 s

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.never_capture = True
_OPTIONS.max_mem = 1 << 20  # bytes


class Pattern:
    """A regular expression in RE2's syntax, which has no lookaround and no backreferences."""

    __slots__ = ("_compiled",)

    def __init__(self, text: str) -> None:
        """Raises ValueError: the pattern is too long, invalid, or could run for long."""
        if not 0 < len(text) <= MAX_LENGTH:
            raise ValueError(f"a text pattern has 1 to {MAX_LENGTH} characters")
        try:
            self._compiled = re2.compile(text, _OPTIONS)
        except re2.error as error:
            raise ValueError(f"not a regular expression of RE2: {error.args[0].decode('utf-8', 'replace')}") from None
        if self.program > MAX_PROGRAM:
            raise ValueError("this pattern could run for long: have it repeat fewer times")

    @property
    def program(self) -> int:
        """Return the number of instructions of its program."""
        return int(self._compiled.programsize)

    def is_in(self, text: str) -> bool:
        """Return whether the pattern matches in the first TEXT_LIMIT characters of the text."""
        return self._compiled.search(text[:TEXT_LIMIT]) is not None


def check_together(patterns: Iterable[str]) -> None:
    """Check the patterns of one step: one response may be searched for all of them.  Raises ValueError."""
    if sum(Pattern(text).program for text in patterns) > MAX_PROGRAMS:
        raise ValueError("the text patterns of these rules could run for long together: use fewer, or shorter ones")
