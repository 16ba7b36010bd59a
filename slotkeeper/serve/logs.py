"""What is logged of an error: one line that says where.  Its text may hold what a client sent."""

import logging
import traceback

log = logging.getLogger("slotkeeper.serve")


def log_failure(what: str, error: BaseException) -> None:
    """Say that `what` failed; with DEBUG, in full.  `what`: nothing that a terminal obeys."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    in_full = log.isEnabledFor(logging.DEBUG)
    log.error("%s failed: %s%s", what, type(error).__name__, where, exc_info=error if in_full else None)
