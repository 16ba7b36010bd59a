"""Error logs: one line with the exception's type and place.

The exception's text may contain data that a client sent, so it is logged only at level DEBUG.
"""

import logging
import traceback

log = logging.getLogger("slotkeeper.serve")


def log_failure(what: str, error: BaseException) -> None:
    """Log that `what` failed; at level DEBUG with the traceback.  `what` must not contain control characters."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    in_detail = log.isEnabledFor(logging.DEBUG)
    log.error("%s failed: %s%s", what, type(error).__name__, where, exc_info=error if in_detail else None)
