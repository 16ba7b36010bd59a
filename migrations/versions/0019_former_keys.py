"""The key of a tenant before its last rotation.

Revision: 0019, after: 0018

Two columns that may be empty: the release before goes on beside it, and takes the present key only.
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("former_hash", sa.Text))
    op.add_column("tenants", sa.Column("former_until_ms", sa.BigInteger))
    op.create_index("ix_tenants_former_hash", "tenants", ["former_hash"])


def downgrade() -> None:
    """Former keys stop working."""
    op.drop_index("ix_tenants_former_hash", "tenants")
    op.drop_column("tenants", "former_until_ms")
    op.drop_column("tenants", "former_hash")
