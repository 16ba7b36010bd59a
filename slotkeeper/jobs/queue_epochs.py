"""Queue epochs: which filling of a fleet's queue in Redis may start jobs.

Two queues of one fleet can be open at the same time: a primary that was demoted keeps its clients for seconds, and a
Redis that was emptied is filled again while starts that it gave out before are on their way.  Each could give out the
same slots.  So each filling has a number, the name of each lease begins with it, and a start is stored only under the
newest (QUEUE-2).

Rows are never deleted, so that numbers never return.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, bindparam, case, func, select, text
from sqlalchemy.dialects import postgresql, sqlite

from slotkeeper.db import Database, Transaction
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.jobs.tables import queue_epochs

_SETTLE_S = 0.05  # A start gets the number of its transaction so long after it has looked at the epoch.
_POLL_S = 0.01
_LAST_TRANSACTION = text("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
_OLDEST_TRANSACTION = text("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
_NUMBER = CompiledStatement(select(queue_epochs.c.number).where(queue_epochs.c.fleet == bindparam("p_fleet")))


@dataclass(frozen=True, slots=True)
class Filling:
    """A filling of a fleet's queue.  name: random.  after: the number of the last epoch as this Redis knows it."""

    name: str
    after: int = 0


def epoch_of_lease(lease: str) -> int:
    """Return the epoch with which the name of a lease begins; 0: it has none."""
    number, dot, _ = lease.partition(".")
    return int(number) if dot and number.isdecimal() else 0


def make_lease_name(epoch: int, name: str) -> str:
    """Return the name of a lease of this epoch; as lua/lib/leases.lua makes it."""
    return f"{epoch}.{name}"


def is_current() -> Any:
    """Return the condition of a start: `p_epoch` is the newest epoch of `p_fleet`; a fleet without a row has 0."""
    newest = select(func.coalesce(func.max(queue_epochs.c.number), 0)).where(
        queue_epochs.c.fleet == bindparam("p_fleet")
    )
    return newest.scalar_subquery() == bindparam("p_epoch", type_=BigInteger)


def read_numbers(database: Database, fleets: Collection[str] | None = None) -> dict[str, int]:
    """Return the newest epoch of these fleets, or of all; a fleet without one is left out."""
    query = select(queue_epochs.c.fleet, queue_epochs.c.number)
    if fleets is not None:
        query = query.where(queue_epochs.c.fleet.in_(list(fleets)))
    with database.read() as connection:
        return {row.fleet: row.number for row in connection.execute(query)}


def claim(database: Database, fillings: Mapping[str, Filling], queue_format: int, now_ms: int) -> dict[str, int]:
    """Give each filling (by fleet) an epoch above all before it, and return the numbers.

    A filling that has one keeps it, so that several processes may fill together.  A fleet whose queue a newer release
    fills in a higher format is left out.

    Returns when no start of an earlier epoch can be stored any more.  Raises DatabaseUnavailable, CommitUnknown.
    """
    if not fillings:
        return {}

    def unit(tx: Transaction) -> dict[str, int]:
        found = {fleet: _claim_one(tx, fleet, one, queue_format, now_ms) for fleet, one in sorted(fillings.items())}
        return {fleet: number for fleet, number in found.items() if number is not None}

    numbers = database.write(unit)
    if database.engine.dialect.name == "postgresql":
        _wait_for_earlier_starts(database)
    return numbers


def _claim_one(tx: Transaction, fleet: str, filling: Filling, queue_format: int, now_ms: int) -> int | None:
    dialect: Any = sqlite if tx.connection.dialect.name == "sqlite" else postgresql
    values = {"filling": filling.name, "format": queue_format, "since_ms": now_ms}
    last = case((queue_epochs.c.number < filling.after, filling.after), else_=queue_epochs.c.number)
    row = dialect.insert(queue_epochs).values(fleet=fleet, number=filling.after + 1, **values)
    claimed = row.on_conflict_do_update(
        index_elements=["fleet"],
        set_={"number": last + 1, **values},
        where=(queue_epochs.c.filling != filling.name) & (queue_epochs.c.format <= queue_format),
    ).returning(queue_epochs.c.number)
    number = tx.connection.execute(claimed).scalar()
    if number is None:  # This filling has an epoch already, or the queue is of a newer format.
        same = (queue_epochs.c.fleet == fleet) & (queue_epochs.c.filling == filling.name)
        number = tx.connection.execute(select(queue_epochs.c.number).where(same)).scalar()
    return None if number is None else int(number)


def _wait_for_earlier_starts(database: Database) -> None:
    """Wait until the transactions are over that may have looked at the epochs before the claim was visible.

    At most `transaction_s`.  A start that takes longer is missed here; its lease is restored when it is found missing
    (routing/maintenance/restore_leases.py).  On SQLite one transaction writes at a time, so none is under way.
    """
    time.sleep(_SETTLE_S)
    until = time.monotonic() + database.limits.transaction_s
    with database.read() as connection:
        last = connection.execute(_LAST_TRANSACTION).scalar_one()
        while connection.execute(_OLDEST_TRANSACTION).scalar_one() < last and time.monotonic() < until:
            time.sleep(_POLL_S)
