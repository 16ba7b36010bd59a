"""How far webhooks are behind what has happened."""

from sqlalchemy import func, select

from slotkeeper.db import Database
from slotkeeper.outbox.event_reader import get_last_id
from slotkeeper.outbox.subscriptions import get_cursor
from slotkeeper.outbox.tables import receivers


def untold_events(database: Database) -> int:
    """How many events the receivers that follow have not been given yet; 0: none, or nobody wants any."""
    follows = (receivers.c.state == "enabled") & receivers.c.behind.is_(None)
    with database.read() as connection:
        following = connection.execute(select(func.min(receivers.c.after_event)).where(follows)).scalar()
        if following is None:
            return 0
        return max(get_last_id(connection) - max(get_cursor(connection), following), 0)
