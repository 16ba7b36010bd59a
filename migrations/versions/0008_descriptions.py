"""Descriptions of servers in versions, the version that each run began with, and secrets by name.

Revision: 0008, after: 0007

New tables, and columns that may be empty: the release before goes on beside it.  It speaks to all servers by the slot
protocol, as it always did, so descriptions should be stored when no process of it runs any more.
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_NEW_OVERRIDES = {"preset", "description", "described_by"}


def upgrade() -> None:
    op.create_table(
        "descriptions",
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("idle_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("version", name="pk_descriptions"),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("models", sa.Text),
        sa.Column("sealed", sa.Text, nullable=False),
        sa.Column("set_by", sa.Text),
        sa.Column("set_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_secrets"),
    )
    op.add_column("jobs", sa.Column("described_by", sa.Text))
    op.add_column("endpoints", sa.Column("overrides", sa.Text, nullable=False, server_default="{}"))


def downgrade() -> None:
    """Forgets descriptions and secrets: all servers are spoken to by the slot protocol afterwards."""
    connection = op.get_bind()
    for name, text in connection.execute(sa.text("SELECT name, overrides FROM models")).all():
        kept = {key: value for key, value in json.loads(text).items() if key not in _NEW_OVERRIDES}
        changed = {"name": name, "kept": json.dumps(kept)}
        connection.execute(sa.text("UPDATE models SET overrides = :kept WHERE name = :name"), changed)
    op.drop_column("endpoints", "overrides")
    op.drop_column("jobs", "described_by")
    op.drop_table("secrets")
    op.drop_table("descriptions")
