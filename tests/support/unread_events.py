"""Count the events that webhooks have not received."""

from sqlalchemy import func, select

from slotkeeper.db import Database
from slotkeeper.outbox.event_reader import get_last_id
from slotkeeper.outbox.subscriptions import get_cursor
from slotkeeper.outbox.tables import receivers


def count_unread_events(database: Database) -> int:
    """Return how many events have no message yet for enabled receivers; 0: none, or there is no receiver."""
    follows = (receivers.c.state == "enabled") & receivers.c.behind.is_(None)
    with database.read() as connection:
        following = connection.execute(select(func.min(receivers.c.after_event)).where(follows)).scalar()
        if following is None:
            return 0
        return max(get_last_id(connection) - max(get_cursor(connection), following), 0)
