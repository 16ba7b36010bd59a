"""How the databases read what a test asks for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from slotkeeper.jobs.store import JobStore


@contextmanager
def plans_of(store: JobStore) -> Iterator[list[str]]:
    """The plan of each statement that is read meanwhile."""
    plans: list[str] = []
    explain = "EXPLAIN QUERY PLAN " if store.database.engine.dialect.name == "sqlite" else "EXPLAIN "

    def look(connection: Any, cursor: Any, statement: str, parameters: Any, *__: Any) -> None:
        if statement.lstrip().startswith(("SELECT", "WITH")) and "jobs" in statement:
            cursor = cursor or connection.connection.cursor()  # compiled_sql passes none
            cursor.execute(explain + statement, parameters)
            plans.append("\n".join(str(row[-1]) for row in cursor.fetchall()) + "\n")

    event.listen(store.database.engine, "before_cursor_execute", look)
    yield plans
    event.remove(store.database.engine, "before_cursor_execute", look)
