"""Events say what they concern, and who has done what; how far each sink of events has come; rights of keys.

Revision: 0010, after: 0011

New columns that may be empty, and a table: the release before goes on beside it; its events say less, and what it lets
operators do is not noted.  On PostgreSQL the index of acts is built CONCURRENTLY where events are written meanwhile,
which ends the transaction of the steps before.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0011"
branch_labels = None
depends_on = None

_ACTS, _IS_ACT = "ix_events_acts", sa.text("actor IS NOT NULL")
_OF_AGE = "OLD.at_ms < coalesce((SELECT value FROM counters WHERE name = 'events.of_age_ms'), 0)"
_ON_SQLITE = (
    "CREATE TRIGGER acts_are_not_changed BEFORE UPDATE ON events WHEN OLD.actor IS NOT NULL "
    "BEGIN SELECT RAISE(ABORT, 'acts are not changed'); END",
    f"CREATE TRIGGER acts_are_not_removed BEFORE DELETE ON events WHEN OLD.actor IS NOT NULL AND NOT ({_OF_AGE}) "
    "BEGIN SELECT RAISE(ABORT, 'acts are not removed before their time'); END",
)
_ON_POSTGRESQL = (
    f"""
CREATE OR REPLACE FUNCTION slotkeeper_keep_acts() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF {_OF_AGE} THEN RETURN OLD; END IF;
    END IF;
    RAISE EXCEPTION 'acts are not changed, nor removed before their time' USING ERRCODE = 'restrict_violation';
END $$
""",
    "CREATE OR REPLACE TRIGGER slotkeeper_acts BEFORE UPDATE OR DELETE ON events FOR EACH ROW "
    "WHEN (OLD.actor IS NOT NULL) EXECUTE FUNCTION slotkeeper_keep_acts()",
    "CREATE OR REPLACE TRIGGER slotkeeper_all_acts BEFORE TRUNCATE ON events FOR EACH STATEMENT "
    "EXECUTE FUNCTION slotkeeper_keep_acts()",
)


def upgrade() -> None:
    # The block below ends the transaction: where the index could not be built, all else is there already.
    unless_there = _is_postgresql() or None
    for name, type_ in (("model", sa.Text), ("tenant", sa.Text), ("priority", sa.Integer), ("server", sa.Text)):
        op.add_column("events", sa.Column(name, type_), if_not_exists=unless_there)
    op.add_column("events", sa.Column("actor", sa.Text), if_not_exists=unless_there)
    rights = sa.Column("rights", sa.Text, nullable=False, server_default=sa.text("''"))
    op.add_column("tenants", rights, if_not_exists=unless_there)
    op.create_table(
        "relays",
        sa.Column("sink", sa.Text, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.Text),
        sa.Column("until_ms", sa.BigInteger, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("sink", name=op.f("pk_relays")),
        if_not_exists=unless_there,
    )
    for statement in _ON_POSTGRESQL if _is_postgresql() else _ON_SQLITE:
        op.execute(statement)
    if not _in_use():
        _create_index()
        return
    with op.get_context().autocommit_block():
        op.execute("SET statement_timeout = 0")
        op.execute("SET lock_timeout = 0")
        op.drop_index(_ACTS, "events", if_exists=True, postgresql_concurrently=True)
        _create_index(postgresql_concurrently=True)
        op.execute("SET statement_timeout = '60s'")
        op.execute("SET lock_timeout = '5s'")


def _is_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def _in_use() -> bool:
    """Whether events are written while the index is built.  SQLite lets nobody write meanwhile."""
    return _is_postgresql() and op.get_bind().execute(sa.text("SELECT 1 FROM events LIMIT 1")).first() is not None


def _create_index(**how: Any) -> None:
    op.create_index(_ACTS, "events", ["id"], sqlite_where=_IS_ACT, postgresql_where=_IS_ACT, **how)


def downgrade() -> None:
    """Forgets all acts: the release before would take them for transitions."""
    if _is_postgresql():
        op.execute("DROP TRIGGER slotkeeper_all_acts ON events")
        op.execute("DROP TRIGGER slotkeeper_acts ON events")
        op.execute("DROP FUNCTION slotkeeper_keep_acts()")
    else:
        op.execute("DROP TRIGGER acts_are_not_removed")
        op.execute("DROP TRIGGER acts_are_not_changed")
    op.execute("DELETE FROM events WHERE actor IS NOT NULL")
    op.drop_index(_ACTS, "events")
    op.drop_table("relays")
    op.drop_column("tenants", "rights")
    for name in ("actor", "server", "priority", "tenant", "model"):
        op.drop_column("events", name)
