"""Text patterns that cannot run away.

Python's regular expressions backtrack, and while one does, every thread of the worker stands
still, heartbeats included.  So a pattern is accepted only if the number of ways in which it can
match from one starting point is small, and it is shown only the first TEXT_LIMIT characters.
"""

import re
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

TEXT_LIMIT = 2048  # characters searched
MAX_LENGTH = 200  # characters of a pattern
MAX_WAYS = 4 * (TEXT_LIMIT + 1)  # one open-ended repeat, and a few alternatives beside it
# Ways times width: what can be tried from one starting point.  At this bound the worst pattern on
# the worst text was measured at half a second.
MAX_WORK = 100 * (TEXT_LIMIT + 1)

_SINGLE = {op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN, op.AT, op.CATEGORY, op.RANGE}
_REPEATS = {op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT}


def compile_pattern(text: str) -> re.Pattern[str]:
    """The compiled pattern.  Raises ValueError if it is too long, wrong, or could run away."""
    if not 0 < len(text) <= MAX_LENGTH:
        raise ValueError(f"a text pattern has 1 to {MAX_LENGTH} characters")
    try:
        tree = _parser.parse(text)
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    ways = _ways(tree)
    if ways > MAX_WAYS or ways * _width(tree) > MAX_WORK:
        raise ValueError("this pattern could run for very long: use at most one open-ended repeat, none nested")
    return compiled


def found(pattern: re.Pattern[str], text: str) -> bool:
    """Whether the pattern occurs in the beginning of the text."""
    return pattern.search(text, 0, TEXT_LIMIT) is not None


def _ways(tree: Any) -> int:
    """In how many ways this sequence can match from one starting point, at most."""
    product = 1
    for code, argument in tree:
        product = min(product * _ways_of_one(code, argument), MAX_WAYS + 1)
    return product


def _width(tree: Any) -> int:
    """How many single steps one of these ways takes; of a repeat those that it must take, and one more round."""
    return sum(_width_of_one(code, argument) for code, argument in tree)


def _width_of_one(code: Any, argument: Any) -> int:
    if code in _REPEATS:
        low, high, body = argument
        return (int(low) + (high != low)) * _width(body)
    if code is op.BRANCH:
        return sum(_width(branch) for branch in argument[1])
    if code in (op.SUBPATTERN, op.ASSERT, op.ASSERT_NOT):
        return _width(argument[-1])
    return _width(argument) if code is op.ATOMIC_GROUP else 1


def _ways_of_one(code: Any, argument: Any) -> int:
    if code in _SINGLE:
        return 1
    if code in _REPEATS:
        return _ways_to_repeat(*argument)
    if code is op.BRANCH:
        return sum(_ways(branch) for branch in argument[1])
    if code in (op.SUBPATTERN, op.ASSERT, op.ASSERT_NOT):
        return _ways(argument[-1])
    if code is op.ATOMIC_GROUP:
        return _ways(argument)
    raise ValueError("a text pattern may not refer back to its own groups")


def _ways_to_repeat(low: int, high: int, body: Any) -> int:
    high = min(int(high), TEXT_LIMIT)
    inner = _ways(body)
    if inner > 1 and high > 1:
        return MAX_WAYS + 1  # choices inside a repeat multiply: the catastrophic kind
    return (high - min(low, high) + 1) * inner
