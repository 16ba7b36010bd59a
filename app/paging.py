"""Pages of a list.  A cursor is opaque to clients; in it stands the `seq` of the last job of a page."""

import re
from collections.abc import Sequence

from jobs.errors import InvalidJob
from jobs.record import Job
from routing.submission import check_model_name

CURSOR = "s[1-9][0-9]{0,18}"
NUMBER = "(0|[1-9][0-9]{0,18})"
_LARGEST = (1 << 63) - 1


def after(page: Sequence[Job], limit: int) -> str | None:
    """The cursor of the next page; None: this one was not full."""
    return f"s{page[-1].seq}" if len(page) == limit else None


def before(cursor: str | None) -> int | None:
    """The `seq` before which the page begins.  Raises InvalidJob for what is no cursor of ours."""
    if cursor is None:
        return None
    if not re.fullmatch(CURSOR, cursor, re.ASCII):
        raise InvalidJob("cursor", "cursor must be the next_cursor of the page before; leave it out for the first page")
    return min(int(cursor[1:]), _LARGEST)


def last_seen(after: str | None) -> int | None:
    """The event behind which a stream goes on.  Raises InvalidJob for what is no number of one."""
    if after is None:
        return None
    if not re.fullmatch(NUMBER, after, re.ASCII):
        raise InvalidJob("after", "after, and Last-Event-ID, must be the id of an event; leave it out to begin now")
    return min(int(after), _LARGEST)


def limits(model: str | None) -> str | None:
    """The model that a list is limited to.  Raises InvalidJob for what can be no model's name."""
    return None if model is None else check_model_name(model)
