"""What a tenant has: what its removal concerns."""

from dataclasses import dataclass

from sqlalchemy import func, select, text

from slotkeeper.db import Database
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import ACTIVE_CONDITION, jobs
from slotkeeper.outbox.tables import receivers


@dataclass(frozen=True, slots=True)
class Holdings:
    """`active`: jobs that have not ended, by state; `webhooks`: how many the tenant has."""

    active: dict[State, int]
    webhooks: int


def count_tenant_holdings(database: Database, tenant: str) -> Holdings:
    """Count what `tenant` has.  Raises DatabaseUnavailable."""
    active = select(jobs.c.state, func.count().label("jobs")).where(text(ACTIVE_CONDITION), jobs.c.tenant == tenant)
    webhooks = select(func.count()).select_from(receivers).where(receivers.c.tenant == tenant)
    with database.read() as connection:
        found = {State(row.state): row.jobs for row in connection.execute(active.group_by(jobs.c.state))}
        return Holdings(found, connection.execute(webhooks).scalar_one())
