"""Move stored times when the shared clock is set.

A time that was counted in seconds from another, such as the end of a ttl, moves with the clock, so that the seconds
stay as they were asked for.  All other times stay: when something happened, and what a client gave as a time.  What is
deleted after some time, such as ended jobs, is too many rows; see slotkeeper.clock.Clock.ago_ms.
"""

from typing import NamedTuple

from sqlalchemy import ColumnClause, Connection, column, table, text, update

from slotkeeper.db.schema import KEYS_VERSION, add_to_counter


class _Times(NamedTuple):
    """condition: SQL; in other rows the time stays, as it stays if it is null or 0.  per_ms: its unit."""

    condition: str = "1 = 1"
    per_ms: int = 1


_IS_ACTIVE = "state IN ('delayed', 'queued', 'running')"
_GIVEN = "coalesce(given_times, '')"

MOVED_TIMES = {
    "api_keys.expires_ms": _Times(),
    "descriptions.idle_ms": _Times(),
    "enrolment_tokens.expires_ms": _Times(),
    "jobs.deadline_ms": _Times(f"{_IS_ACTIVE} AND {_GIVEN} NOT LIKE '%deadline%'"),
    "jobs.due_ms": _Times(f"why <> 'scheduled' OR {_GIVEN} NOT LIKE '%not_before%'"),
    "jobs.sent_ms": _Times(_IS_ACTIVE),
    "jobs.started_ms": _Times(_IS_ACTIVE),
    "messages.next_ms": _Times("state = 'pending'"),
    "messages.owed_ms": _Times("state = 'pending'"),
    "quarantined_slots.began_ms": _Times(),
    "quarantined_slots.quiet_ms": _Times(),
    "quarantined_slots.since_ms": _Times(),
    "quarantined_slots.until_ms": _Times(),
    "receivers.failing_since_ms": _Times(),
    "receivers.former_until_ms": _Times(),
    "receivers.open_until_ms": _Times(),
    "receivers.paced_until_us": _Times(per_ms=1000),
    "relays.until_ms": _Times(),
    "result_notifications.created_ms": _Times(),
    "result_notifications.next_ms": _Times(),
    "tenants.former_until_ms": _Times(),
    "validations.next_ms": _Times(),
}
"""The columns that move, as "table.column"."""


def move_times(connection: Connection, by_ms: int) -> int:
    """Move all times of MOVED_TIMES, in the transaction in which the clock is set, and return how many."""
    moved = 0
    for name, times in MOVED_TIMES.items():
        table_name, column_name = name.split(".")
        time: ColumnClause[int] = column(column_name)
        statement = update(table(table_name, time)).where(time > 0, text(f"({times.condition})"))
        moved += connection.execute(statement.values({column_name: time + by_ms * times.per_ms})).rowcount
    add_to_counter(connection, KEYS_VERSION)  # Processes have copies of keys with their ends.
    return moved
