"""A row for each batch, with the number of lines received, and an index that counts its jobs by state.

Each batch that is there gets a row.  Processes of the release before submit batches without one: they work, but lists
do not show them.

Revision: 0012, after: 0011
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None
drops = ("batches", "batch_errors")  # by its downgrade, with their content

_IN_BATCH, _HAS_KEY = sa.text("batch IS NOT NULL"), sa.text("key IS NOT NULL")
_UNFINISHED = sa.text("state IN ('open', 'closed')")
_FILL = (
    "INSERT INTO batches (tenant, id, state, created_ms, changed_ms) "
    "SELECT tenant, batch, 'named', min(created_ms), max(created_ms) FROM jobs WHERE batch IS NOT NULL "
    "GROUP BY tenant, batch"
)


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("name", sa.Text),
        sa.Column("key", sa.Text),
        sa.Column("fingerprint", sa.Text),
        sa.Column("on_error", sa.Text, nullable=False, server_default="skip"),
        sa.Column("head", sa.Text, nullable=False, server_default="{}"),
        sa.Column("callback_url", sa.Text),
        sa.Column("deadline_ms", sa.BigInteger),
        sa.Column("lines", sa.Integer, nullable=False, server_default="0"),
        sa.Column("refused", sa.Integer, nullable=False, server_default="0"),
        sa.Column("paused", sa.Integer, nullable=False, server_default="0"),
        sa.Column("has_held", sa.Integer, nullable=False, server_default="0"),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("changed_ms", sa.BigInteger, nullable=False),
        sa.Column("closed_ms", sa.BigInteger),
        sa.Column("cancel_ms", sa.BigInteger),
        sa.Column("ended_ms", sa.BigInteger),
        sa.Column("ends", sa.Text),
        sa.PrimaryKeyConstraint("tenant", "id", name=op.f("pk_batches")),
        sa.CheckConstraint("state IN ('named', 'open', 'closed', 'ended')", name=op.f("ck_batches_state")),
        sa.CheckConstraint("on_error IN ('skip', 'refuse')", name=op.f("ck_batches_on_error")),
    )
    op.create_index("ix_batches_id", "batches", ["id"])
    op.create_index(
        "ix_batches_unfinished", "batches", ["created_ms"], sqlite_where=_UNFINISHED, postgresql_where=_UNFINISHED
    )
    op.create_index(
        "uq_batches_key", "batches", ["tenant", "key"], unique=True, sqlite_where=_HAS_KEY, postgresql_where=_HAS_KEY
    )
    op.create_table(
        "batch_errors",
        sa.Column("batch", sa.Text, nullable=False),
        sa.Column("line", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("custom_id", sa.Text),
        sa.Column("code", sa.Text, nullable=False),
        sa.Column("field", sa.Text),
        sa.Column("message", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("batch", "line", name=op.f("pk_batch_errors")),
    )
    op.execute(_FILL)
    _index_jobs("tenant", "batch", "state", "seq")


def downgrade() -> None:
    _index_jobs("tenant", "batch")
    op.drop_table("batch_errors")
    op.drop_table("batches")


def _index_jobs(*columns: str) -> None:
    op.drop_index("ix_jobs_tenant_batch", "jobs")
    op.create_index("ix_jobs_tenant_batch", "jobs", list(columns), sqlite_where=_IN_BATCH, postgresql_where=_IN_BATCH)
