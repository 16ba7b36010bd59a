"""Signed envelopes of results that nodes returned: one for each job that ended so, as long as the job is kept."""

from typing import NamedTuple

from sqlalchemy import select

from slotkeeper.db import Database, Transaction
from slotkeeper.db.compiled_sql import BulkInsert
from slotkeeper.jobs.tables import envelopes
from slotkeeper.jobs.values import SignedResult

_INSERT = BulkInsert(envelopes)


class StoredEnvelope(NamedTuple):
    """The envelope of a job's result.  text: JSON, as it was verified."""

    node: str
    key_id: str
    attempt: int
    text: str
    at_ms: int


def add_envelope(tx: Transaction, job_id: str, attempt: int, signed: SignedResult, at_ms: int) -> None:
    """Store the envelope of a result, in the transaction that completes the job."""
    row = {
        "job_id": job_id,
        "attempt": attempt,
        "node": signed.node,
        "key_id": signed.key_id,
        "text": signed.envelope,
        "at_ms": at_ms,
    }
    tx.insert(_INSERT, row)


def find_envelope(database: Database, job_id: str) -> StoredEnvelope | None:
    """Return the envelope of a job's result; None: no node returned it."""
    with database.read() as connection:
        row = connection.execute(select(envelopes).where(envelopes.c.job_id == job_id)).first()
    return None if row is None else StoredEnvelope(row.node, row.key_id, row.attempt, row.text, row.at_ms)
