"""The pace of webhooks, callbacks that were given up, and visits to the page that were ended.

Revision: 0016, after: 0015

A new table, an index, and columns that may be empty: the release before goes on beside it.  It knows neither pace nor
ended visits: where no process of it runs any more, both hold.  On PostgreSQL the index is built CONCURRENTLY where
callbacks are written meanwhile.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_INDEX = "ix_webhooks_given_up"
_GIVEN_UP = sa.text("state = 'given_up'")


def upgrade() -> None:
    # The block below ends the transaction: where the index could not be built, all else is there already.
    unless_there = _is_postgresql() or None
    op.create_table(
        "ended_visits",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("until_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ended_visits")),
        if_not_exists=unless_there,
    )
    op.add_column("receivers", sa.Column("max_per_s", sa.Float), if_not_exists=unless_there)
    paced = sa.Column("paced_until_us", sa.BigInteger, nullable=False, server_default="0")
    op.add_column("receivers", paced, if_not_exists=unless_there)
    if not _in_use():
        _create_index()
        return
    with op.get_context().autocommit_block():
        op.execute("SET statement_timeout = 0")
        op.execute("SET lock_timeout = 0")
        op.drop_index(_INDEX, "webhooks", if_exists=True, postgresql_concurrently=True)
        _create_index(postgresql_concurrently=True)
        op.execute("SET statement_timeout = '60s'")
        op.execute("SET lock_timeout = '5s'")


def _is_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def _in_use() -> bool:
    """Whether callbacks are written while the index is built.  SQLite lets nobody write meanwhile."""
    bind = op.get_bind()
    some = sa.text("SELECT 1 FROM webhooks LIMIT 1")
    return _is_postgresql() and bind.execute(some).first() is not None


def _create_index(**how: Any) -> None:
    columns = ["created_ms", "id"]
    op.create_index(_INDEX, "webhooks", columns, sqlite_where=_GIVEN_UP, postgresql_where=_GIVEN_UP, **how)


def downgrade() -> None:
    """Forgets the pace of webhooks, and log-outs: a copied cookie opens the page again until its time is over."""
    op.drop_index(_INDEX, "webhooks")
    op.drop_column("receivers", "paced_until_us")
    op.drop_column("receivers", "max_per_s")
    op.drop_table("ended_visits")
