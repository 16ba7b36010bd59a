"""A log of what each version of the catalog changed, so that processes read the changes alone.

Versions of the release before, whose processes go on, are not in it: after one of these the whole catalog is read.

Revision: 0006, after: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None
drops = ("catalog_changes",)  # by its downgrade; the catalog stays as it is


def upgrade() -> None:
    op.create_table(
        "catalog_changes",
        sa.Column("version", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("part", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("mark", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("version", "part", "name", name=op.f("pk_catalog_changes")),
    )


def downgrade() -> None:
    op.drop_table("catalog_changes")
