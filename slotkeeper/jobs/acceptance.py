"""Which job a tenant's Idempotency-Key names, within a window, and what was asked for under an id."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from sqlalchemy import Connection, bindparam, delete, insert, or_, select

from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.errors import IdempotencyConflict
from slotkeeper.jobs.closed_models import ModelClosed
from slotkeeper.jobs.tables import idempotency_keys, jobs
from slotkeeper.jobs.values import NewJob

Row: TypeAlias = Any

_THIS_KEY = (idempotency_keys.c.tenant == bindparam("p_tenant")) & (idempotency_keys.c.key == bindparam("p_key"))
_KNOWN = CompiledStatement(
    select(idempotency_keys.c.job_id, idempotency_keys.c.fingerprint, idempotency_keys.c.expires_ms).where(_THIS_KEY)
)
# Not its times: they are counted from now, and a message may come again much later.
_REQUEST = ("model", "payload", "tenant", "callback_url", "constraints")
_ASKED = CompiledStatement(
    select(jobs.c.id, jobs.c.seq, jobs.c.state, *(jobs.c[name].label(name) for name in _REQUEST)).where(
        jobs.c.id == bindparam("p_id")
    )
)
# Never one that was bound since we looked: on PostgreSQL another process may have done so.
_FORGET = CompiledStatement(
    delete(idempotency_keys).where(
        _THIS_KEY,
        # A sum, as no index has it: this is asked of the row that the key finds.
        or_(idempotency_keys.c.expires_ms + 0 <= bindparam("p_now"), idempotency_keys.c.job_id == bindparam("p_gone")),
    )
)
_BIND = CompiledStatement(insert(idempotency_keys), [column.name for column in idempotency_keys.c])


def find_job_of_key(connection: Connection, job: NewJob, now_ms: int) -> str | None:
    """Id of the job that this one's key names; None: the key is free.  Raises IdempotencyConflict."""
    known = _look(connection, job)
    if known is None or known.expires_ms <= now_ms:
        return None
    if known.fingerprint != job.fingerprint:
        raise IdempotencyConflict(
            "This Idempotency-Key came with a different request before; send the same request again, or use a new key.",
            job_id=known.job_id,
        )
    return str(known.job_id)


def check_same_request(connection: Connection, job: NewJob) -> Row:
    """The job that has this id already.

    Raises IdempotencyConflict: something else was asked for under it; NameClosed: there is none, so that is why it was
    not accepted.
    """
    row = _ASKED.fetch_first(connection, {"p_id": job.id})
    if row is None:
        raise ModelClosed(f"No jobs are accepted under the name {job.model!r} any more.", model=job.model)
    for name in _REQUEST:
        if getattr(row, name) != getattr(job, name):
            raise IdempotencyConflict(
                f"There is a job {job.id!r} already, which differs in its {name}; "
                "send the same request again, or take a new id.",
                job_id=job.id,
            )
    return row


def bind_key(connection: Connection, job: NewJob, now_ms: int, expires_ms: int, gone: str | None) -> None:
    """Let the key name this job from now on, instead of one whose window is over, or that is `gone`."""
    _FORGET.execute(connection, _whose(job) | {"p_now": now_ms, "p_gone": gone})
    row = {
        "tenant": job.tenant,
        "key": job.idempotency_key,
        "job_id": job.id,
        "fingerprint": job.fingerprint,
        "expires_ms": expires_ms,
    }
    _BIND.execute(connection, row)


def knows_all_keys(connection: Connection, new: Sequence[NewJob], now_ms: int) -> bool:
    """Whether each of these has a key that was used within the window."""
    found = (_look(connection, job) if job.idempotency_key is not None else None for job in new)
    return all(row is not None and row.expires_ms > now_ms for row in found)


def delete_expired_keys(connection: Connection, now_ms: int) -> int:
    """Remove the keys whose window is over; answers how many."""
    return connection.execute(delete(idempotency_keys).where(idempotency_keys.c.expires_ms <= now_ms)).rowcount


def _look(connection: Connection, job: NewJob) -> Row:
    return _KNOWN.fetch_first(connection, _whose(job))


def _whose(job: NewJob) -> dict[str, Any]:
    return {"p_tenant": job.tenant, "p_key": job.idempotency_key}
