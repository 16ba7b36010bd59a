"""Pages of a list.  A cursor is opaque to clients; in it stands the `seq` of the last job of a page."""

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
"""An event of a job's stream, and the last that its server said before or by it: the attempt, and when, ms."""
_CURSOR = re.compile(CURSOR)
_LARGEST = (1 << 63) - 1


def encode_job_cursor(page: Sequence[Job], limit: int) -> str | None:
    """The cursor of the next page; None: this one was not full."""
    return f"s{page[-1].seq}" if len(page) == limit else None


def decode_job_cursor(cursor: str | None) -> int | None:
    """The `seq` before which the page begins; None: it is the first.  Raises InvalidRequest, as `cursor_of`."""
    found = match_cursor(_CURSOR, cursor)
    return found and bounded_int(found[0][1:])


def match_cursor(form: re.Pattern[str], cursor: str | None) -> re.Match[str] | None:
    """A cursor of this form, read; None: there is none.  Raises InvalidRequest for what is no cursor of ours."""
    found = None if cursor is None else form.fullmatch(cursor)
    if found is None and cursor is not None:
        raise InvalidRequest("cursor", "cursor must be the next_cursor of the page before; left out: the first page")
    return found


def bounded_int(digits: str) -> int:
    """As the record can compare it: what is larger stands behind everything as well."""
    return min(int(digits), _LARGEST)


def parse_event_id(after: str | None) -> int | None:
    """The event behind which a stream goes on.  Raises InvalidRequest for what is no number of one."""
    if after is None:
        return None
    if not re.fullmatch(NUMBER, after, re.ASCII):
        raise InvalidRequest("after", "after, and Last-Event-ID, must be the id of an event; leave it out to begin now")
    return bounded_int(after)


def parse_progress_id(after: str | None) -> tuple[int | None, EntryId]:
    """The event behind which a job's stream goes on, and what was said behind which it does.  Raises InvalidRequest."""
    event, _, heard = (after or "").partition("-")
    if not heard or not re.fullmatch(PROGRESS_ID, after or "", re.ASCII):
        return parse_event_id(after), FIRST_ENTRY
    attempt, _, ms = heard.partition("-")
    return parse_event_id(event), EntryId(bounded_int(attempt), bounded_int(ms))


def model_filter(model: str | None) -> str | None:
    """The model that a list is limited to.  Raises InvalidRequest for what can be no model's name."""
    return None if model is None else check_name(model)


def label_filter(label: str) -> str:
    """Return the text of a label, given as `NAME=VALUE`.  Raises InvalidRequest, InvalidJob."""
    name, separator, value = label.partition("=")
    if not separator:
        raise InvalidRequest("label", "label must be NAME=VALUE, such as team=search")
    return label_text(name, value)


def batch_filter(batch: str | None, field: str = "batch") -> str | None:
    """The batch that a list is limited to, or begins behind.  Raises InvalidRequest for what can be no batch's id."""
    if batch is not None and not re.fullmatch(BATCH, batch, re.ASCII):
        raise InvalidRequest(field, f"{field} must be the id of a batch, as POST /queue/submit-batch answers it")
    return batch
