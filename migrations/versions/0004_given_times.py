"""Which times of a job its client gave as times, and not in seconds.

Revision: 0004, after: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None
drops = ("jobs.given_times",)  # by its downgrade, with their content


def upgrade() -> None:
    op.add_column("jobs", sa.Column("given_times", sa.Text))


def downgrade() -> None:
    op.drop_column("jobs", "given_times")
