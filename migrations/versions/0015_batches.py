"""Which jobs came together.

Revision: 0015, after: 0013

A column that may be empty, and two indexes of jobs where it is not: the release before goes on beside it, and its
batches are jobs that came alone.  On PostgreSQL the indexes are built CONCURRENTLY where jobs are written meanwhile.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0013"
branch_labels = None
depends_on = None

_INDEXES = {"ix_jobs_batch_seq": ["batch", "seq"], "ix_jobs_tenant_batch": ["tenant", "batch"]}
_IN_BATCH = sa.text("batch IS NOT NULL")


def upgrade() -> None:
    # The block below ends the transaction: where an index could not be built, the column is there already.
    op.add_column("jobs", sa.Column("batch", sa.Text), if_not_exists=_is_postgresql() or None)
    if not _in_use():
        _create_indexes()
        return
    with op.get_context().autocommit_block():
        op.execute("SET statement_timeout = 0")
        op.execute("SET lock_timeout = 0")
        for name in _INDEXES:
            op.drop_index(name, "jobs", if_exists=True, postgresql_concurrently=True)
        _create_indexes(postgresql_concurrently=True)
        op.execute("SET statement_timeout = '60s'")
        op.execute("SET lock_timeout = '5s'")


def _is_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def _in_use() -> bool:
    """Whether jobs are written while the indexes are built.  SQLite lets nobody write meanwhile."""
    bind = op.get_bind()
    return _is_postgresql() and bind.execute(sa.text("SELECT 1 FROM jobs LIMIT 1")).first() is not None


def _create_indexes(**how: Any) -> None:
    for name, columns in _INDEXES.items():
        op.create_index(name, "jobs", columns, sqlite_where=_IN_BATCH, postgresql_where=_IN_BATCH, **how)


def downgrade() -> None:
    """Forgets which jobs came together."""
    for name in reversed(_INDEXES):
        op.drop_index(name, "jobs")
    op.drop_column("jobs", "batch")
