"""What a server's slots are in use for, by the database: also those of a server that was removed."""

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import func, select

from slotkeeper.db import Transaction
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs, quarantined_slots


class SlotUse(NamedTuple):
    """Running jobs, in order of submission, and how many slots are quarantined, because they may still run a job."""

    running: tuple[str, ...]
    quarantined: int

    def __bool__(self) -> bool:
        return bool(self.running or self.quarantined)


def find_slot_use(tx: Transaction, server: str, *, except_models: Collection[str] = ()) -> SlotUse:
    """Return what the server's slots are in use for.  except_models: leave out what belongs to these."""
    running = select(jobs.c.id).where(jobs.c.state == State.RUNNING.value, jobs.c.server == server)
    quarantined = select(func.count()).select_from(quarantined_slots).where(quarantined_slots.c.server == server)
    if except_models:
        running = running.where(jobs.c.model.not_in(except_models))
        quarantined = quarantined.where(quarantined_slots.c.model.not_in(except_models))
    return SlotUse(
        tuple(tx.connection.execute(running.order_by(jobs.c.seq)).scalars()),
        int(tx.connection.execute(quarantined).scalar_one()),
    )
