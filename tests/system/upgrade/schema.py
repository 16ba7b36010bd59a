"""What a database knows of its tables."""

from typing import Any

from sqlalchemy import Connection, text


def schema_of(connection: Connection) -> dict[str, Any]:
    """All that a database knows of its tables, in a form that can be compared."""
    if connection.dialect.name == "sqlite":
        rows = connection.execute(
            text("SELECT name, sql FROM sqlite_master WHERE type IN ('table', 'index') AND name NOT LIKE 'sqlite%'")
        )
        return {name: _sqlite_parts(sql) for name, sql in rows if name != "alembic_version"}
    columns = text(
        "SELECT table_name || '.' || column_name, data_type, is_nullable, column_default, is_identity "
        "FROM information_schema.columns WHERE table_schema = 'public'"
    )
    constraints = text(
        "SELECT conname, pg_get_constraintdef(oid), '', '', '' FROM pg_constraint "
        "WHERE connamespace = 'public'::regnamespace"
    )
    indexes = text("SELECT indexname, indexdef, '', '', '' FROM pg_indexes WHERE schemaname = 'public'")
    found = {row[0]: tuple(row[1:]) for part in (columns, constraints, indexes) for row in connection.execute(part)}
    return {name: facts for name, facts in found.items() if "alembic_version" not in name}


def _sqlite_parts(sql: str) -> list[str]:
    """The statement's parts without their order: constraints may be named in any, a late column stands last."""
    head, _, body = sql.partition("(")
    depth, parts = 0, [""]
    for sign in body.rpartition(")")[0]:
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return sorted(" ".join(part.replace('"', "").split()) for part in (head, *parts))
