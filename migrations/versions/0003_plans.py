"""What keeps every search of jobs short: listings by tenant and by model, queued jobs by model.

Revision: 0003, after: 0002

On PostgreSQL an index of a table in use is built CONCURRENTLY, which ends the transaction of the steps before; one
that was left half-built is built anew.  The release before goes on beside it.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# (name, columns, condition)
_INDEXES: Sequence[tuple[str, list[str], str | None]] = (
    ("ix_jobs_tenant_seq", ["tenant", "seq"], None),
    ("ix_jobs_model_seq", ["model", "seq"], None),
    ("ix_jobs_queued", ["model", "seq"], "state = 'queued'"),
)
# How much of a table may have changed before PostgreSQL cleans it up, and before it counts it again.
_AUTOVACUUM = {"autovacuum_vacuum_scale_factor": "0.02", "autovacuum_analyze_scale_factor": "0.01"}


def upgrade() -> None:
    if not _in_use():
        _create_indexes()
    else:
        with op.get_context().autocommit_block():
            # A large table takes longer than a statement may; and who waits here keeps nobody else waiting.
            op.execute("SET statement_timeout = 0")
            op.execute("SET lock_timeout = 0")
            _create_indexes(postgresql_concurrently=True)
            op.execute("SET statement_timeout = '60s'")
            op.execute("SET lock_timeout = '5s'")
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"ALTER TABLE jobs SET ({', '.join(f'{name} = {value}' for name, value in _AUTOVACUUM.items())})")


def _in_use() -> bool:
    """Whether jobs are written while the index is built.  SQLite lets nobody write meanwhile, however it is done."""
    bind = op.get_bind()
    return bind.dialect.name == "postgresql" and bind.execute(sa.text("SELECT 1 FROM jobs LIMIT 1")).first() is not None


def _create_indexes(**how: Any) -> None:
    for name, columns, condition in _INDEXES:
        where = sa.text(condition) if condition else None
        if how:
            op.drop_index(name, "jobs", if_exists=True, **how)
        op.create_index(name, "jobs", columns, sqlite_where=where, postgresql_where=where, **how)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"ALTER TABLE jobs RESET ({', '.join(_AUTOVACUUM)})")
    for name, _, _ in reversed(_INDEXES):
        op.drop_index(name, "jobs")
