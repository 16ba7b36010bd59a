"""Receivers of webhooks, what they are still to be told, and what came of the last tries.

Revision: 0011, after: 0008

New tables only.  The release before goes on beside it and sends the webhooks of single jobs, as it always did.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0008"
branch_labels = None
depends_on = None

_PENDING = sa.text("state = 'pending'")


def upgrade() -> None:
    op.create_table(
        "receivers",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("types", sa.Text, nullable=False),
        sa.Column("template", sa.Text),
        sa.Column("description", sa.Text, nullable=False, server_default=sa.text("''")),
        sa.Column("sealed", sa.Text, nullable=False),
        sa.Column("former_sealed", sa.Text),
        sa.Column("former_until_ms", sa.BigInteger),
        sa.Column("state", sa.Text, nullable=False, server_default="enabled"),
        sa.Column("reason", sa.Text),
        sa.Column("changed_by", sa.Text),
        sa.Column("changed_ms", sa.BigInteger),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("after_event", sa.BigInteger, nullable=False),
        sa.Column("behind", sa.BigInteger),
        sa.Column("failures", sa.Integer, nullable=False, server_default="0"),
        sa.Column("failing_since_ms", sa.BigInteger),
        sa.Column("open_until_ms", sa.BigInteger, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_receivers"),
        sa.CheckConstraint("state IN ('enabled', 'disabled')", name=op.f("ck_receivers_state")),
    )
    op.create_index("ix_receivers_tenant", "receivers", ["tenant"])
    op.create_table(
        "messages",
        sa.Column("receiver", sa.Text, nullable=False),
        sa.Column("event", sa.BigInteger, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False, server_default="pending"),
        sa.Column("tries", sa.Integer, nullable=False, server_default="0"),
        sa.Column("next_ms", sa.BigInteger, nullable=False),
        sa.Column("owed_ms", sa.BigInteger, nullable=False),
        sa.Column("ended_ms", sa.BigInteger),
        sa.Column("last_status", sa.Integer),
        sa.Column("last_error", sa.Text),
        sa.PrimaryKeyConstraint("receiver", "event", name="pk_messages"),
        sa.CheckConstraint("state IN ('pending', 'given_up')", name=op.f("ck_messages_state")),
    )
    op.create_index("ix_messages_job", "messages", ["job_id", "receiver", "event"])
    op.create_index(
        "ix_messages_next", "messages", ["receiver", "next_ms"], sqlite_where=_PENDING, postgresql_where=_PENDING
    )
    op.create_table(
        "tries",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False, autoincrement=True),
        sa.Column("receiver", sa.Text, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("latency_ms", sa.Integer, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("answer", sa.Text),
        sa.Column("inside", sa.Integer, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_tries"),
        sa.CheckConstraint("outcome IN ('delivered', 'failed', 'given_up')", name=op.f("ck_tries_outcome")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_tries_receiver", "tries", ["receiver", "id"])


def downgrade() -> None:
    """Forgets all receivers: nothing is told to them afterwards."""
    op.drop_table("tries")
    op.drop_table("messages")
    op.drop_table("receivers")
