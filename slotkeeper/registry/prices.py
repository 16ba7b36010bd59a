"""What a second of a slot costs, by model and by what its server declares."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, delete, insert, select

from slotkeeper.audit import commit_audited, make_entry
from slotkeeper.db import Database, Transaction
from slotkeeper.registry import catalog_changes
from slotkeeper.registry.catalog_changes import Change, Part
from slotkeeper.registry.tables import prices

MAX_PRICES = 1000
MAX_PER_SLOT_S = 1_000_000_000
"""Micro-credits: a thousand credits a second."""
MAX_RESERVE_S = 86_400


@dataclass(frozen=True, slots=True)
class Price:
    """A row of the price list.  The first row that fits a run applies; without one it costs nothing.

    model: None: any.  condition: on the run's server, in routing's canonical text; "": any server.
    per_slot_s: micro-credits.  reserve_s: for how many seconds credits are held when a job is accepted.
    """

    model: str | None
    condition: str
    per_slot_s: int
    reserve_s: int

    def is_for(self, model: str) -> bool:
        return self.model is None or self.model == model


def list_prices(connection: Connection) -> tuple[Price, ...]:
    """Return the price list, in its order."""
    rows = connection.execute(select(prices).order_by(prices.c.position))
    return tuple(Price(row.model, row.condition, row.per_slot_s, row.reserve_s) for row in rows)


def set_prices(database: Database, given: Sequence[Price], now_ms: int) -> None:
    """Replace the price list.  Raises DatabaseUnavailable, CommitUnknown."""
    rows = [{"position": position, **asdict(price)} for position, price in enumerate(given)]

    def unit(tx: Transaction) -> bool:
        # A process of the release before reads its whole catalog again after it.
        catalog_changes.raise_version(tx, Change(Part.DEFAULTS))
        tx.connection.execute(delete(prices))
        if rows:
            tx.connection.execute(insert(prices), rows)
        return True

    commit_audited(database, make_entry("price.set", now_ms=now_ms, prices=len(rows)), unit)
