"""Queued jobs that have a slot, in which they are to be resumed.

Revision: 0021, after: 0020

An index that is empty as a rule.  On PostgreSQL it is built CONCURRENTLY where jobs are written meanwhile.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_NAME = "ix_jobs_to_be_resumed"
_THESE = sa.text("state = 'queued' AND slot IS NOT NULL")


def upgrade() -> None:
    bind = op.get_bind()
    if bind.dialect.name != "postgresql" or bind.execute(sa.text("SELECT 1 FROM jobs LIMIT 1")).first() is None:
        _create_index()
        return
    with op.get_context().autocommit_block():
        op.execute("SET statement_timeout = 0")
        op.execute("SET lock_timeout = 0")
        op.drop_index(_NAME, "jobs", if_exists=True, postgresql_concurrently=True)
        _create_index(postgresql_concurrently=True)
        op.execute("SET statement_timeout = '60s'")
        op.execute("SET lock_timeout = '5s'")


def _create_index(**how: Any) -> None:
    op.create_index(_NAME, "jobs", ["seq"], sqlite_where=_THESE, postgresql_where=_THESE, **how)


def downgrade() -> None:
    op.drop_index(_NAME, "jobs")
