"""What few jobs have: their own retry policy and the expected size of their result, as JSON.

Processes of the release before treat such jobs as their models' configurations say.

Revision: 0009, after: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None
drops = ("jobs.terms",)  # by its downgrade, with their content


def upgrade() -> None:
    op.add_column("jobs", sa.Column("terms", sa.Text))


def downgrade() -> None:
    op.drop_column("jobs", "terms")
