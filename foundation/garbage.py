"""When Python looks for garbage that refers to itself."""

import gc

from foundation.once import once

_COLLECT_AFTER = 20_000  # new objects


@once
def collect_rarely() -> None:
    """For a process that answers in milliseconds: a collection stops all its threads, and looks at all that was ever
    imported unless it is told not to.  To be called when that has been done."""
    gc.collect()
    gc.freeze()  # Once only: what is garbage by then stays for ever.
    gc.set_threshold(_COLLECT_AFTER)
