"""What is owed to Celery's clients when a job ends: a row for each, until they have been told.

Revision: 0005, after: 0003

A new table and nothing else.  The release before goes on beside it: the ends that it writes are owed to nobody, and
told by it at once or not at all, as before.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tellings",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("next_ms", sa.BigInteger, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tellings")),
    )
    op.create_index(op.f("ix_tellings_job_id"), "tellings", ["job_id"])
    op.create_index(op.f("ix_tellings_next_ms"), "tellings", ["next_ms"])


def downgrade() -> None:
    """Forgets what has not been told yet."""
    op.drop_table("tellings")
