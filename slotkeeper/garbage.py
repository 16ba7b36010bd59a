"""Collect garbage rarely in processes that must answer within milliseconds."""

import gc

from slotkeeper.process import singleton

_COLLECT_AFTER = 20_000  # new objects


@singleton
def tune_garbage_collection() -> None:
    """Exclude what has been imported from garbage collection, and collect the rest less often.

    A collection stops all threads and visits every object that is not frozen.  Call once, when the imports are done:
    garbage that exists by then is never freed.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
