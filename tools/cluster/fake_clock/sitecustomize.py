"""Python imports this at the start of a process whose clock the drill sets (process_clocks.py).

time.sleep sleeps until a time of the monotonic clock.  libfaketime takes that time for one of the clock that it
changes, and the sleep fails with "Invalid argument".  select takes a duration instead.
"""

import select
import time


def _sleep(seconds: float, /) -> None:
    select.select([], [], [], seconds)


time.sleep = _sleep  # type: ignore[assignment]
