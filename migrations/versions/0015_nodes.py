"""Nodes: machines whose agents connect to a gateway; their keys, their enrolment tokens, and their
signed results.

Revision: 0015, after: 0014
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None
drops = ("envelopes", "nodes", "node_keys", "enrolment_tokens")  # by its downgrade, with their content


def upgrade() -> None:
    op.create_table(
        "nodes",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("granted", sa.Text, nullable=False),
        sa.Column("token", sa.Text, nullable=False),
        sa.Column("declaration", sa.Text),
        sa.Column("digest", sa.Text),
        sa.Column("fault", sa.Text),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("seen_ms", sa.BigInteger),
        sa.Column("revoked_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sa.UniqueConstraint("name", name=op.f("uq_nodes_name")),
    )
    op.create_index("ix_nodes_token", "nodes", ["token"])
    op.create_table(
        "node_keys",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("public_key", sa.Text, nullable=False),
        sa.Column("from_ms", sa.BigInteger, nullable=False),
        sa.Column("retired_ms", sa.BigInteger),
        sa.Column("revoked_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_node_keys")),
        sa.ForeignKeyConstraint(["node"], ["nodes.id"], name=op.f("fk_node_keys_node"), ondelete="CASCADE"),
    )
    op.create_index("ix_node_keys_node", "node_keys", ["node"])
    op.create_table(
        "enrolment_tokens",
        sa.Column("hash", sa.Text, nullable=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("granted", sa.Text, nullable=False),
        sa.Column("made_by", sa.Text),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=False),
        sa.Column("uses_left", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_enrolment_tokens")),
        sa.UniqueConstraint("id", name=op.f("uq_enrolment_tokens_id")),
    )
    op.create_table(
        "envelopes",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_envelopes")),
    )


def downgrade() -> None:
    op.drop_table("envelopes")
    op.drop_table("enrolment_tokens")
    op.drop_table("node_keys")
    op.drop_table("nodes")
