"""What tenants use, by day and model, counted from now on.

Maintenance of the release before counts no usage: the minutes in which it runs beside this schema are missing.

Revision: 0010, after: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None
drops = ("usage_days",)  # by its downgrade, with their content


def upgrade() -> None:
    op.create_table(
        "usage_days",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("model", sa.Text, primary_key=True),
        *(
            sa.Column(name, sa.BigInteger, nullable=False)
            for name in ("slot_ms", "runs", "accepted", "completed", "ended")
        ),
    )


def downgrade() -> None:
    op.drop_table("usage_days")
