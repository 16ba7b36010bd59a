"""Python imports this at the start of a process whose clock the drill sets (process_clocks.py).

libfaketime mistakes a sleep until a moment of the monotonic clock, which is how time.sleep sleeps, for one until a
moment of the clock that it changes: "Invalid argument".  select waits for so and so long instead.
"""

import select
import time


def _sleep(seconds: float, /) -> None:
    select.select([], [], [], seconds)


time.sleep = _sleep  # type: ignore[assignment]
