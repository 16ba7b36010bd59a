"""Jobs by the end of their id, which people are shown.

Revision: 0018, after: 0017

An index of jobs.  On PostgreSQL it is built CONCURRENTLY where jobs are written meanwhile.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_NAME = "ix_jobs_id_end"


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
    op.create_index(_NAME, "jobs", [sa.text("substr(id, 29)")], **how)


def downgrade() -> None:
    op.drop_index(_NAME, "jobs")
