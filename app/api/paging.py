"""Pages of a list.  A cursor is opaque to clients; in it stands the `seq` of the last job of a page."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Sequence

from jobs.errors import InvalidJob
from jobs.record import Job
from routing.submission import check_model_name

_LARGEST = (1 << 63) - 1


def after(page: Sequence[Job], limit: int) -> str | None:
    """The cursor of the next page; None: this one was not full."""
    return urlsafe_b64encode(b"seq:%d" % page[-1].seq).decode() if len(page) == limit else None


def before(cursor: str | None) -> int | None:
    """The `seq` before which the page begins.  Raises InvalidJob for what is no cursor of ours."""
    if cursor is None:
        return None
    try:
        kind, _, number = urlsafe_b64decode(cursor.encode()).partition(b":")
        seq = int(number)
    except (Error, ValueError):
        kind, seq = b"", 0
    if kind != b"seq" or not 0 < seq <= _LARGEST:
        raise InvalidJob("cursor", "cursor must be the next_cursor of the page before; leave it out for the first page")
    return seq


def limits(model: str | None) -> str | None:
    """The model that a list is limited to.  Raises InvalidJob for what can be no model's name."""
    return None if model is None else check_model_name(model)
