"""When Python looks for garbage that refers to itself.

While one of our programs loads, it does not: there is next to none, and each look goes through all that has been
loaded, a sixth of the time until a process is at work.  So this is to be imported first of all.  Who imports us as a
library is left alone.
"""

import gc
import sys

from foundation.once import once

_LOADING = 500_000  # new objects: more than any program loads, and a bound where nobody says that it has
_COLLECT_AFTER = 20_000
_OURS = ("app", "tasks")
_usual = gc.get_threshold()


def _is_ours() -> bool:
    """Whether one of our programs is being loaded, and not one of others that imports us before it has begun."""
    if sys.argv[:1] != ["-m"]:  # So it is while `python -m` looks for the program's module, and never later.
        return False
    _, _, program = " ".join(sys.orig_argv).partition(" -m ")
    return program.partition(" ")[0].partition(".")[0] in _OURS


if _is_ours():
    gc.set_threshold(_LOADING)


def collect_as_usual() -> None:
    """For a program that has loaded what it needs to begin."""
    if gc.get_threshold()[0] == _LOADING:
        gc.set_threshold(*_usual)


@once
def collect_rarely() -> None:
    """For a process that answers in milliseconds: a collection stops all its threads, and looks at all that was ever
    imported unless it is told not to.  To be called when that has been done."""
    gc.collect()
    gc.freeze()  # Once only: what is garbage by then stays for ever.
    gc.set_threshold(_COLLECT_AFTER)
