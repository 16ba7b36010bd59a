"""Accept the lines of batches, one chunk after another.

A chunk is accepted whole: each of its lines is a job or an error that the batch keeps, and the batch's `lines` moves in
the same transaction.  A refusal of the chunk (no slots in a queue, a rate) stores nothing, and the client sends it
again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from pydantic import Field, ValidationError

from routing.admission.job_request import JobRequest
from routing.admission.pricing import with_cost
from routing.admission.submission import Submission, not_before_ms, prepare_job
from routing.admission.submit_limits import LimitStatus, explain_closed_model
from routing.dispatch.dispatcher import Dispatcher, queued_job
from slotkeeper.clock import now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.db.schema import storable_text
from slotkeeper.db.time_limits import time_limit
from slotkeeper.errors import Conflict, InvalidJob, InvalidRequest
from slotkeeper.jobs.batch_ids import MAX_LINES, line_job_id
from slotkeeper.jobs.batches import Batch, Batches, BatchMoved, BatchState, LineError, OnError, require
from slotkeeper.jobs.values import NewJob
from slotkeeper.registry.identity import Identity
from slotkeeper.registry.snapshot import CatalogSnapshot

_TRIES = 3
_MESSAGES = {"missing": "is missing; send it", "extra_forbidden": "is not known; remove it"}
MAX_CUSTOM_ID = 200
_MAX_MESSAGE, _MAX_FIELD = 1000, 100  # characters of what is kept of an error
INHERITED = ("model", "priority", "constraints", "labels", "environment", "on_failure", "expected_output", "ttl")
"""Fields that a line has from the head of its batch, unless it has its own."""


class BatchLine(JobRequest):
    """One line of a batch, with what it inherits."""

    custom_id: str | None = Field(None, min_length=1, max_length=MAX_CUSTOM_ID)


LineValue: TypeAlias = Any
"""The JSON value of a line; or, if it is none, an error that says so."""


class MissingLines(Conflict):
    """Lines before these have not been received."""

    code = "lines_missing"


@dataclass(frozen=True, slots=True)
class ChunkReceipt:
    """What came of a chunk.  accepted, refused: lines that are new.  known: lines that had been received before.

    batch: as it is afterwards; its `lines` is the number of the line to go on with, which may be one of the chunk.
    """

    batch: Batch
    accepted: int
    refused: int
    known: int
    rates: Sequence[LimitStatus] = ()


_Numbered: TypeAlias = tuple[int, NewJob]


def add_lines(
    dispatcher: Dispatcher,
    batches: Batches,
    batch: Batch,
    first: int,
    values: Sequence[LineValue],
    sender: Identity,
    traceparent: str | None = None,
) -> ChunkReceipt:
    """Accept the lines of a chunk that begins with line `first`, or as many of them as its tenant may submit at once.

    Raises MissingLines; Conflict: the batch takes no more lines, or a model or tenant no jobs; TooManyRequests;
    InvalidRequest: the batch is too long; InsufficientCredits, ModelClosed, DatabaseUnavailable, CommitUnknown.
    """
    with time_limit(dispatcher.store.database.limits.request_s):
        tries = 1
        while True:
            try:
                return _add(dispatcher, batches, batch, first, values, sender, traceparent)
            except BatchMoved:
                if tries == _TRIES:
                    raise
                tries, batch = tries + 1, require(batches.get(batch.tenant, batch.id), batch.id)


def _add(
    dispatcher: Dispatcher,
    batches: Batches,
    batch: Batch,
    first: int,
    values: Sequence[LineValue],
    sender: Identity,
    traceparent: str | None,
) -> ChunkReceipt:
    require_lines(batch, first)
    known = min(batch.lines - first, len(values))
    values, first = values[known:], first + known
    if not values:
        return ChunkReceipt(batch, 0, 0, known)
    catalog, now = dispatcher.catalog.get(), now_ms()
    _check_takes_lines(batch, first + len(values), catalog.limits_of(batch.tenant).max_batch_lines or MAX_LINES)
    new, errors = _prepare(dispatcher, batch, first, values, catalog, now, traceparent)
    rates: list[LimitStatus] = []
    count = len(values)
    if new:
        admitted, refused, rates = _admit(dispatcher, [job for _, job in new], sender, catalog, now)
        for index, error in refused.items():
            line, _ = new[index]
            errors.append(_line_error(line, error, values[line - first]))
        if len(admitted) + len(refused) < len(new):  # The others come with the next chunk.
            count = new[len(admitted) + len(refused)][0] - first
        new = [new[index] for index in admitted]
    errors = [error for error in errors if error.line < first + count]
    jobs = [job for _, job in new]
    accepted = batches.accept_lines(batch, first, count, jobs, errors, now)
    crash_at("batch_chunk_committed")
    entering = [queued_job(job, one.seq, now) for job, one in zip(jobs, accepted, strict=True) if one.enters_queue]
    dispatcher.enqueue(entering, new=True)
    moved = replace(batch, lines=first + count, refused=batch.refused + len(errors), changed_ms=now)
    return ChunkReceipt(moved, len(jobs), len(errors), known, rates)


def require_lines(batch: Batch, lines: int) -> None:
    """Raise MissingLines unless so many lines of the batch have been received."""
    if lines > batch.lines:
        detail = f"Batch {batch.id!r} has {batch.lines} lines; send those from {batch.lines} on first."
        raise MissingLines(detail, batch=batch.id, next_line=batch.lines)


def _check_takes_lines(batch: Batch, lines: int, most: int) -> None:
    """Raise Conflict or InvalidRequest unless the batch can have so many lines."""
    if batch.cancel_ms is not None or batch.state is not BatchState.OPEN:
        why = "was canceled" if batch.cancel_ms is not None else f"is {batch.state}"
        raise Conflict(
            f"Batch {batch.id!r} {why} with {batch.lines} lines and takes no more; submit the others as a new batch.",
            batch=batch.id,
            next_line=batch.lines,
        )
    if lines > most:
        detail = f"lines: a batch of tenant {batch.tenant!r} has at most {most} lines; begin another one"
        raise InvalidRequest("lines", detail)


# -- one line ----------------------------------------------------------------------------------------------------


def _prepare(
    dispatcher: Dispatcher,
    batch: Batch,
    first: int,
    values: Sequence[LineValue],
    catalog: CatalogSnapshot,
    now_ms: int,
    traceparent: str | None,
) -> tuple[list[_Numbered], list[LineError]]:
    """Return the valid jobs of lines with the numbers of their lines, and the errors of the other lines."""
    environment = catalog.limits_of(batch.tenant).allowed_environments[0]
    jobs: list[_Numbered] = []
    errors: list[LineError] = []
    for line, value in enumerate(values, first):
        try:
            if isinstance(value, InvalidRequest):
                raise value
            submission = make_submission(batch, line, value, now_ms, traceparent)
            model = catalog.resolve(submission.request.model)
            if closed := explain_closed_model(catalog, model):
                raise InvalidJob("model", closed)
            job = prepare_job(submission, model, dispatcher.check_url, now_ms, environment)
            if job.tenant in catalog.metered:
                job = with_cost(job, catalog)
        except InvalidRequest as error:
            errors.append(_line_error(line, error, value))
        else:
            is_held = batch.holds_lines and job.not_before_ms is None
            jobs.append((line, replace(job, is_held=True) if is_held else job))
    return jobs, errors


def make_submission(batch: Batch, line: int, value: Any, now_ms: int, traceparent: str | None) -> Submission:
    """Return the submission of a line.  Raises InvalidJob."""
    request = read_line(value, batch.head)
    if request.cancel_when_gone is not None:
        raise InvalidJob("cancel_when_gone", "cancel_when_gone: no client waits for a line of a batch; leave it out")
    if request.not_before is not None and batch.on_error is OnError.REFUSE:
        detail = "not_before: with on_error=refuse all lines are released when the batch is complete; leave it out"
        raise InvalidJob("not_before", detail)
    expires_ms = batch.deadline_ms
    if expires_ms is not None and isinstance(request.ttl, int | float) and now_ms + 1000 * request.ttl < expires_ms:
        expires_ms = None
    return Submission(
        request,
        tenant=batch.tenant,
        source="batch",
        id=line_job_id(batch.id, line),
        traceparent=traceparent,
        batch=batch.id,
        expires_ms=expires_ms,
        not_before_ms=not_before_ms(request.not_before),
        custom_id=request.custom_id,
    )


def read_line(value: Any, head: Mapping[str, Any]) -> BatchLine:
    """Return a line with what it inherits from the head of its batch.  Raises InvalidJob."""
    if not isinstance(value, dict):
        raise InvalidJob("line", 'a line must be a JSON object, such as {"payload": {"prompt": "a sunset"}}')
    merged = {**head, **value}
    if isinstance(head.get("labels"), dict) and isinstance(value.get("labels"), dict):
        merged["labels"] = head["labels"] | value["labels"]
    try:
        return BatchLine.model_validate(merged)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "line"
        message = _MESSAGES.get(first["type"], f"is wrong: {first['msg']}")
        raise InvalidJob(field, f"{field} {message}") from None


def _line_error(line: int, error: InvalidRequest, value: LineValue) -> LineError:
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    known = custom_id if isinstance(custom_id, str) else ""
    return LineError(
        line,
        error.code,
        storable_text(error.detail, _MAX_MESSAGE),
        storable_text(error.field, _MAX_FIELD),
        storable_text(known, MAX_CUSTOM_ID) or None,
    )


# -- limits ------------------------------------------------------------------------------------------------------


def _admit(
    dispatcher: Dispatcher, jobs: Sequence[NewJob], sender: Identity, catalog: CatalogSnapshot, now_ms: int
) -> tuple[list[int], dict[int, InvalidJob], list[LimitStatus]]:
    """Return the indexes of the first jobs that are admitted, those among them that no limit would ever admit, and what
    is left of the sender's rates.

    Raises as Admission.check, but not for single jobs, nor because so many jobs are too many at once.
    """
    admission, refused = dispatcher.admission, dict[int, InvalidJob]()
    waiting = list(range(len(jobs)))
    while waiting:
        chosen = [jobs[index] for index in waiting]
        try:
            rates = admission.check(
                chosen, sender, catalog, now_ms, are_lines=True, are_held=all(job.is_held for job in chosen)
            )
        except InvalidJob as error:
            at = error.facts.get("index")
            if isinstance(at, int):
                refused[waiting.pop(at)] = error
                if len(refused) == 1:  # Look at the others one by one, without Redis.
                    found = {
                        n: why for n in waiting if (why := admission.find_refusal(jobs[n], sender, catalog, now_ms))
                    }
                    refused |= found
                    waiting = [n for n in waiting if n not in found]
            elif error.field == "jobs" and len(waiting) > 1:
                waiting = waiting[: len(waiting) // 2]
                refused = {n: why for n, why in refused.items() if n <= waiting[-1]}
            else:
                raise
        else:
            return waiting, refused, rates
    return [], refused, []
