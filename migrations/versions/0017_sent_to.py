"""The address to which a run was sent.

Revision: 0017, after: 0016

A column that may be empty: the release before goes on beside it, and its runs are asked for at their server's address
of today.
"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("sent_to", sa.Text))


def downgrade() -> None:
    """Forgets to which address runs were sent."""
    op.drop_column("jobs", "sent_to")
