"""Slots that are withheld because their server has not let go of a run that has ended here.

Revision: 0006, after: 0005

A new table only.  The release before goes on beside it: it frees such slots at once, as it always did.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "withheld",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("server", sa.Text, nullable=False),
        sa.Column("slot", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("remote_id", sa.Text),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("began_ms", sa.BigInteger, nullable=False),
        sa.Column("since_ms", sa.BigInteger, nullable=False),
        sa.Column("until_ms", sa.BigInteger, nullable=False),
        sa.Column("quiet_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("job_id", "attempt", name="pk_withheld"),
    )


def downgrade() -> None:
    op.drop_table("withheld")
