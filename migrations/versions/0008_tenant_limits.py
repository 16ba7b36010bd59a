"""Limits of tenants, as JSON.

What the release before knows of them, a tenant's rate and burst, is copied; its processes go on with their columns.  A
later migration drops tenants.rate_per_s and burst.

Revision: 0008, after: 0007
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None
drops = ("tenants.limits",)  # by its downgrade, with their content; rates of tenants stay


def upgrade() -> None:
    op.add_column("tenants", sa.Column("limits", sa.Text, nullable=False, server_default="{}"))
    connection = op.get_bind()
    limited = sa.text("SELECT name, rate_per_s, burst FROM tenants WHERE rate_per_s IS NOT NULL")
    for row in connection.execute(limited).all():
        limits = {"rate_per_s": row.rate_per_s} | ({} if row.burst is None else {"burst": row.burst})
        values = {"name": row.name, "limits": json.dumps(limits)}
        connection.execute(sa.text("UPDATE tenants SET limits = :limits WHERE name = :name"), values)


def downgrade() -> None:
    op.drop_column("tenants", "limits")
