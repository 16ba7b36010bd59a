"""Names of models are closed, given away and opened again; what that means for jobs stands in jobs/names.py."""

from sqlalchemy import delete, insert, text, update

from database.db import Transaction
from foundation.errors import Conflict
from jobs.models import closed_models
from jobs.names import Because, ClosedName, find


def hold_jobs(tx: Transaction) -> None:
    """Let nobody else write jobs until this transaction has ended; whoever does has ended before."""
    if tx.connection.dialect.name == "postgresql":
        tx.connection.execute(text("LOCK TABLE jobs IN SHARE ROW EXCLUSIVE MODE"))


def close(tx: Transaction, it: ClosedName) -> None:
    """Close a name, or say anew why it is.  The caller holds the jobs."""
    tx.connection.execute(delete(closed_models).where(closed_models.c.name == it.name))
    values = {name: getattr(it, name) for name in it.__slots__} | {"because": it.because.value}
    tx.connection.execute(insert(closed_models), values)


def take(tx: Transaction, name: str, now_ms: int, owner: str | None = None) -> None:
    """Open a name for a new model, or for `owner`, whose it was before.  Raises Conflict while it means another."""
    closed = find(tx, name)
    if closed is None:
        return
    means = closed.stands_for(now_ms)
    if means is not None and means != owner:
        raise Conflict(
            f"{name!r} is the former name of model {means!r}, and submits under it are taken for that; take another "
            f"name, or end that first: DELETE /admin/models/{means}/former-names/{name}.",
            model=name,
            now_called=means,
        )
    reopen(tx, name)


def reopen(tx: Transaction, name: str, because: Because | None = None) -> bool:
    """False: it was not closed, or not for this."""
    there = closed_models.c.name == name
    if because is not None:
        there &= closed_models.c.because == because.value
    return tx.connection.execute(delete(closed_models).where(there)).rowcount == 1


def follow(tx: Transaction, model: str, now_called: str | None) -> None:
    """The model gets another name, and so do its former ones; None: it is gone, and they with it."""
    values = {"now_called": now_called} if now_called else {"now_called": None, "because": Because.REMOVED.value}
    tx.connection.execute(update(closed_models).where(closed_models.c.now_called == model).values(**values))
