"""Labels of jobs.

Revision: 0002, after: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None
drops = ("jobs.labels",)  # by its downgrade, with their content


def upgrade() -> None:
    # The release before inserts jobs without labels: the default stands in for them.
    op.add_column("jobs", sa.Column("labels", sa.Text, server_default="", nullable=False))


def downgrade() -> None:
    op.drop_column("jobs", "labels")
