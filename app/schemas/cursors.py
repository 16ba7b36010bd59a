"""Parse cursors and filters of lists.  A cursor is opaque to clients; it holds the `seq` of the last job of a page."""

import re
from collections.abc import Sequence

from routing.admission.labels import label_text
from routing.admission.submission import check_name
from routing.progress import FIRST_ENTRY, EntryId
from slotkeeper.errors import InvalidRequest
from slotkeeper.jobs.values import Job

CURSOR = "s[1-9][0-9]{0,18}"
BATCH = "[0-9a-f-]{36}"
NUMBER = "(0|[1-9][0-9]{0,18})"
PROGRESS_ID = f"{NUMBER}(-{NUMBER}-{NUMBER})?"
"""An id in a job's stream: the number of an event, then the attempt and the time, in ms, of a progress entry."""
_CURSOR = re.compile(CURSOR)
_LARGEST = (1 << 63) - 1


def encode_job_cursor(page: Sequence[Job], limit: int) -> str | None:
    """Return the cursor of the next page; None if this page is not full."""
    return f"s{page[-1].seq}" if len(page) == limit else None


def decode_job_cursor(cursor: str | None) -> int | None:
    """Return the `seq` before which the page begins; None: the first page.  Raises InvalidRequest."""
    match = match_cursor(_CURSOR, cursor)
    return match and bounded_int(match[0][1:])


def match_cursor(form: re.Pattern[str], cursor: str | None) -> re.Match[str] | None:
    """Match a cursor against its pattern; None if there is no cursor.  Raises InvalidRequest if it does not match."""
    match = None if cursor is None else form.fullmatch(cursor)
    if match is None and cursor is not None:
        raise InvalidRequest(
            "cursor", "cursor must be the next_cursor of the previous page; omit it for the first page"
        )
    return match


def bounded_int(digits: str) -> int:
    """Return the number, or the largest that the database can compare: no id is larger than that."""
    return min(int(digits), _LARGEST)


def parse_event_id(after: str | None) -> int | None:
    """Return the number of the event after which a stream continues.  Raises InvalidRequest if it is no number."""
    if after is None:
        return None
    if not re.fullmatch(NUMBER, after, re.ASCII):
        raise InvalidRequest(
            "after", "after, and Last-Event-ID, must be the id of an event; omit it to begin with the next event"
        )
    return bounded_int(after)


def parse_progress_id(after: str | None) -> tuple[int | None, EntryId]:
    """Return the event and the progress entry after which a job's stream continues.  Raises InvalidRequest."""
    event, _, progress = (after or "").partition("-")
    if not progress or not re.fullmatch(PROGRESS_ID, after or "", re.ASCII):
        return parse_event_id(after), FIRST_ENTRY
    attempt, _, ms = progress.partition("-")
    return parse_event_id(event), EntryId(bounded_int(attempt), bounded_int(ms))


def model_filter(model: str | None) -> str | None:
    """Return the model that a list is limited to.  Raises InvalidRequest if it is not a valid name."""
    return None if model is None else check_name(model)


def label_filter(label: str) -> str:
    """Return the text of a label, given as `NAME=VALUE`.  Raises InvalidRequest, InvalidJob."""
    name, separator, value = label.partition("=")
    if not separator:
        raise InvalidRequest("label", "label must be NAME=VALUE, such as team=search")
    return label_text(name, value)


def batch_filter(batch: str | None, field: str = "batch") -> str | None:
    """Return the batch that a list is limited to, or begins after.  Raises InvalidRequest if it is not a valid id."""
    if batch is not None and not re.fullmatch(BATCH, batch, re.ASCII):
        raise InvalidRequest(
            field, f"{field} must be the id of a batch, as in the response of POST /queue/submit-batch"
        )
    return batch
