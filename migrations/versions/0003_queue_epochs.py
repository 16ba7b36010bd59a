"""Queue epochs: which filling of a fleet's queue may start jobs.

Revision: 0003, after: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None
drops = ("queue_epochs",)  # by its downgrade, with their content


def upgrade() -> None:
    op.create_table(
        "queue_epochs",
        sa.Column("fleet", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("filling", sa.Text, nullable=False),
        sa.Column("store", sa.Text, server_default="main", nullable=False),
        sa.Column("format", sa.Integer, nullable=False),
        sa.Column("since_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("fleet", name=op.f("pk_queue_epochs")),
    )


def downgrade() -> None:
    op.drop_table("queue_epochs")
