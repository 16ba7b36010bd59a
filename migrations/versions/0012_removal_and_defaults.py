"""Models and servers that are removed, and defaults of configurations.

Revision: 0012, after: 0010

New tables, and columns that may be empty: the release before goes on beside it.  It knows neither: it accepts jobs
under names that are closed, and treats all models by the built-in defaults.  So models should be removed or
given defaults when no process of it runs any more.
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0010"
branch_labels = None
depends_on = None

_OF_SERVERS = (
    ("leaving_ms", sa.BigInteger),
    ("leaving_by", sa.Text),
)


def upgrade() -> None:
    op.create_table(
        "closed_models",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("because", sa.Text, nullable=False),
        sa.Column("changed_by", sa.Text),
        sa.Column("changed_ms", sa.BigInteger, nullable=False),
        sa.CheckConstraint("because IN ('removing', 'removed')", name=op.f("ck_closed_models_because")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_closed_models")),
    )
    op.create_table(
        "defaults",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("overrides", sa.Text, nullable=False, server_default="{}"),
        sa.Column("changed_by", sa.Text),
        sa.Column("changed_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_defaults")),
    )
    for name, type_ in _OF_SERVERS:
        op.add_column("servers", sa.Column(name, type_))


def downgrade() -> None:
    """Forgets kinds and defaults, and what was being removed."""
    connection = op.get_bind()
    for name, text in connection.execute(sa.text("SELECT name, overrides FROM models")).all():
        kept = {key: value for key, value in json.loads(text).items() if key != "kind"}
        changed = {"name": name, "kept": json.dumps(kept)}
        connection.execute(sa.text("UPDATE models SET overrides = :kept WHERE name = :name"), changed)
    for name, _ in reversed(_OF_SERVERS):
        op.drop_column("servers", name)
    op.drop_table("defaults")
    op.drop_table("closed_models")
