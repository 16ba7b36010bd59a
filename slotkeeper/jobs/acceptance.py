"""Accept new jobs, once for each id and each Idempotency-Key."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import Connection, bindparam, delete, insert, or_, select

from slotkeeper.db import Transaction
from slotkeeper.db.compiled_sql import BulkInsert, CompiledStatement
from slotkeeper.db.schema import add_to_counter
from slotkeeper.errors import IdempotencyConflict, InsufficientCredits
from slotkeeper.jobs import closed_models, credits, events
from slotkeeper.jobs.statements import JOB_STATE
from slotkeeper.jobs.states import Reason, State, find_edge
from slotkeeper.jobs.tables import idempotency_keys, jobs
from slotkeeper.jobs.values import SAME_REQUEST_FIELDS, SPEC_FIELDS, AcceptedJob, NewJob, without_environment

Row: TypeAlias = Any

_THIS_KEY = (idempotency_keys.c.tenant == bindparam("p_tenant")) & (idempotency_keys.c.key == bindparam("p_key"))
_FIND_KEY = CompiledStatement(
    select(idempotency_keys.c.job_id, idempotency_keys.c.fingerprint, idempotency_keys.c.expires_ms).where(_THIS_KEY)
)
_REQUEST_FIELDS = ("payload", *SAME_REQUEST_FIELDS)
_FIND_REQUEST = CompiledStatement(
    select(jobs.c.id, jobs.c.seq, jobs.c.state, *(jobs.c[name].label(name) for name in _REQUEST_FIELDS)).where(
        jobs.c.id == bindparam("p_id")
    )
)
# Never a key that was bound since it was read: on PostgreSQL another process may have done so.
_DELETE_KEY = CompiledStatement(
    delete(idempotency_keys).where(
        _THIS_KEY,
        # A sum, which no index has: it is compared in the row that the key finds.
        or_(
            idempotency_keys.c.expires_ms + 0 <= bindparam("p_expired"),
            idempotency_keys.c.job_id == bindparam("p_gone"),
        ),
    )
)
_INSERT_KEY = CompiledStatement(insert(idempotency_keys), [column.name for column in idempotency_keys.c])

_REQUESTED = ("id", "payload", *SPEC_FIELDS)
_get_requested = attrgetter(*_REQUESTED)
_INSERT_JOBS = BulkInsert(jobs, unique=("id",), returning=(jobs.c.id, jobs.c.seq, closed_models.CLOSED_COLUMN))


class PreparedJob(NamedTuple):
    """A job that is to be accepted, with its row, and the event of its transition to `to`."""

    job: NewJob
    to: State
    row: dict[str, Any]
    event: dict[str, Any]


def prepare(job: NewJob, now_ms: int) -> PreparedJob:
    """Make the rows of a new job, before the transaction begins that keeps other writers waiting."""
    why = Reason.SUBMITTED if job.not_before_ms is None and not job.is_held else Reason.SCHEDULED
    to = find_edge(None, why).to
    requested = dict(zip(_REQUESTED, _get_requested(job), strict=True))
    own = {"state": to.value, "why": why.value, "created_ms": now_ms, "due_ms": job.not_before_ms}
    return PreparedJob(job, to, requested | own, events.make_row(job, to, now_ms, 0, {"why": why}))


def accept(
    tx: Transaction, new: Sequence[PreparedJob], expired_ms: int, key_expires_ms: int
) -> list[AcceptedJob] | IdempotencyConflict:
    """Accept all jobs or none, and return one value for each, in order.

    A job whose id, or whose Idempotency-Key within its window, is known is not accepted again.  Of the others, those
    that cost something hold their credits afterwards; `find_shortage` comes before.
    expired_ms: keys that expire until then have expired.  key_expires_ms: when new keys expire.

    Returns a conflict of the first job, before anything was written.  Raises any other conflict, and ModelClosed, so
    that the transaction is rolled back.
    """
    accepted: list[AcceptedJob] = []
    for group in _group_by_key(new):
        try:
            accepted += _accept_group(tx, group, expired_ms, key_expires_ms)
        except IdempotencyConflict as conflict:
            if accepted or conflict.facts["job_id"] in {prepared.job.id for prepared in group}:
                raise
            return conflict
    return accepted


def find_shortage(tx: Transaction, paid: Sequence[PreparedJob], expired_ms: int) -> InsufficientCredits | None:
    """Return a refusal if a tenant has too few credits for its jobs that are new, before anything was written.

    paid: the jobs that cost something.
    """
    if not paid:
        return None
    needed = Counter[str]()
    for job in (prepared.job for prepared in paid):
        needed[job.tenant] += job.reserved or 0
    short = credits.find_shortage(tx, needed)
    if short:  # Some of the jobs may have been accepted before, or come twice.
        seen = set[Any]()
        for job in (prepared.job for prepared in paid):
            names = {job.id} if job.idempotency_key is None else {job.id, (job.tenant, job.idempotency_key)}
            if job.tenant in short and (names & seen or _is_known(tx.connection, job, expired_ms)):
                needed[job.tenant] -= job.reserved or 0
            seen |= names
        short = credits.find_shortage(tx, {tenant: needed[tenant] for tenant in short})
    return next(iter(short.values()), None)


def _is_known(connection: Connection, job: NewJob, expired_ms: int) -> bool:
    """Return whether this job, or one with its key, is stored, so that it is not accepted again."""
    ids = [job.id]
    if job.idempotency_key is not None:
        key = _find_key(connection, job)
        if key is not None and key.expires_ms > expired_ms:
            ids.append(key.job_id)
    return any(JOB_STATE.fetch_first(connection, {"p_id": one}) is not None for one in ids)


def _group_by_key(new: Sequence[PreparedJob]) -> Iterator[Sequence[PreparedJob]]:
    """Yield the jobs in their order; those with a key one by one, for it may be the key of the job before."""
    for has_key, group in groupby(new, lambda prepared: prepared.job.idempotency_key is not None):
        prepared = list(group)
        yield from ([one] for one in prepared) if has_key else [prepared]


def _accept_group(
    tx: Transaction, new: Sequence[PreparedJob], expired_ms: int, key_expires_ms: int
) -> list[AcceptedJob]:
    first = new[0].job
    if first.idempotency_key is not None and (known := _bind_key(tx, first, expired_ms, key_expires_ms)) is not None:
        return [known]
    inserted = {row.id: row for row in _INSERT_JOBS.execute(tx.connection, [prepared.row for prepared in new])}
    return [_accept_row(tx, prepared, inserted.pop(prepared.job.id, None)) for prepared in new]


def _accept_row(tx: Transaction, prepared: PreparedJob, row: Row | None) -> AcceptedJob:
    job = prepared.job
    if row is None:  # The id is known: a message came twice.
        add_to_counter(tx.connection, "doubled")  # SQLite has given it a number, which the ledger must not miss.
        return _as_duplicate(_check_same_request(tx.connection, job))
    if row.closed_name is not None:
        raise closed_models.ModelClosed(f"No jobs are accepted under the name {job.model!r} any more.", model=job.model)
    events.add_row(tx, prepared.event)
    if job.reserved is not None:
        credits.reserve(tx, job, row.seq, 0, prepared.row["created_ms"])
    is_overdue = job.deadline_ms is not None and job.deadline_ms <= prepared.row["created_ms"]
    return AcceptedJob(job.id, row.seq, prepared.to, is_overdue=is_overdue)


def _as_duplicate(row: Row) -> AcceptedJob:
    return AcceptedJob(row.id, row.seq, State(row.state), deduplicated=True)


def _check_same_request(connection: Connection, job: NewJob) -> Row:
    """Return the job that has this id.  Raises IdempotencyConflict if another request was accepted under it."""
    row = _FIND_REQUEST.fetch_first(connection, {"p_id": job.id})
    for name in _REQUEST_FIELDS:
        if not _is_same(name, getattr(row, name), getattr(job, name)):
            raise IdempotencyConflict(
                f"There is a job {job.id!r} already, which differs in its {name}; "
                "send the same request again, or take a new id.",
                job_id=job.id,
            )
    return row


def _is_same(field: str, known: Any, sent: Any) -> bool:
    if field == "constraints":  # A changed default of the tenant makes no other request.
        return without_environment(known) == without_environment(sent)
    return bool(known == sent)


# -- Idempotency-Keys --------------------------------------------------------------------------------------------


def _bind_key(tx: Transaction, job: NewJob, expired_ms: int, expires_ms: int) -> AcceptedJob | None:
    """Bind the key to this job, or return the job to which it is bound."""
    known_id = find_job_of_key(tx.connection, job, expired_ms)
    known = JOB_STATE.fetch_first(tx.connection, {"p_id": known_id}) if known_id is not None else None
    if known is not None:
        return _as_duplicate(known)
    # The key is free, its window is over, or its job (`known_id`) was deleted.
    _DELETE_KEY.execute(tx.connection, _key_parameters(job) | {"p_expired": expired_ms, "p_gone": known_id})
    row = {
        "tenant": job.tenant,
        "key": job.idempotency_key,
        "job_id": job.id,
        "fingerprint": job.fingerprint,
        "expires_ms": expires_ms,
    }
    _INSERT_KEY.execute(tx.connection, row)
    return None


def find_job_of_key(connection: Connection, job: NewJob, expired_ms: int) -> str | None:
    """Return the id of the job to which the key of this one is bound; None if the key is free.

    Raises IdempotencyConflict if the key came with another request.
    """
    known = _find_key(connection, job)
    if known is None or known.expires_ms <= expired_ms:
        return None
    if known.fingerprint != job.fingerprint:
        raise IdempotencyConflict(
            "This Idempotency-Key came with a different request before; send the same request again, or use a new key.",
            job_id=known.job_id,
        )
    return str(known.job_id)


def knows_all_keys(connection: Connection, new: Sequence[NewJob], expired_ms: int) -> bool:
    """Return whether each of these jobs has a key that was used within its window."""
    found = (_find_key(connection, job) if job.idempotency_key is not None else None for job in new)
    return all(row is not None and row.expires_ms > expired_ms for row in found)


def _find_key(connection: Connection, job: NewJob) -> Row:
    return _FIND_KEY.fetch_first(connection, _key_parameters(job))


def _key_parameters(job: NewJob) -> dict[str, Any]:
    return {"p_tenant": job.tenant, "p_key": job.idempotency_key}
