"""Bounded queues, aging, and urgent priorities by permission, for new installations alone.

A database that has models, tenants, jobs or defaults keeps what it had: nothing, so that its queues have no bound, its
order is `priority`, and every tenant may use each priority.

Revision: 0011, after: 0010
"""

import json
import time

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None
drops = ()  # What it inserts is valid before it, too.

_INSTALLATION = ""
_DEFAULTS = {"policy": "aging", "max_waiting": 1_000_000}
_LIMITS = {_INSTALLATION: {"most_urgent": 4}, "default": {"most_urgent": 1}}


def upgrade() -> None:
    connection, now_ms = op.get_bind(), int(time.time() * 1000)
    used = any(
        connection.execute(sa.text(f"SELECT 1 FROM {table} LIMIT 1")).first() is not None
        for table in ("models", "tenants", "jobs", "defaults")
    )
    if used:
        return
    columns: list[sa.ColumnClause[object]] = [sa.column(name) for name in ("name", "overrides", "changed_ms")]
    op.bulk_insert(
        sa.table("defaults", *columns),
        [{"name": _INSTALLATION, "overrides": json.dumps(_DEFAULTS), "changed_ms": now_ms}],
    )
    columns = [sa.column(name) for name in ("name", "key_hash", "limits", "created_ms")]
    rows = [
        {"name": name, "key_hash": f"-limits of {name}", "limits": json.dumps(limits), "created_ms": now_ms}
        for name, limits in _LIMITS.items()
    ]
    op.bulk_insert(sa.table("tenants", *columns), rows)


def downgrade() -> None:
    pass
