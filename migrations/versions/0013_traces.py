"""The trace in which a job was submitted.

Revision: 0013, after: 0012

A column that may be empty: the release before goes on beside it, and its jobs have traces of their own.
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("traceparent", sa.Text))


def downgrade() -> None:
    """Forgets in which traces jobs were submitted."""
    op.drop_column("jobs", "traceparent")
