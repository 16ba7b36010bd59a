"""Credits: transfers, the parts of balances, accounts of tenants, prices; and what a job holds.

Processes of the release before work on beside it, and end no job of a metered tenant: no account can be opened while
one of them runs.

Revision: 0013, after: 0012
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None
# By its downgrade, with their content.
drops = ("transfers", "balance_parts", "credit_accounts", "prices", "jobs.reserved", "jobs.price")

_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_HOLDS = sa.text("reserved > 0")
_OF_JOB = sa.text("seq IS NOT NULL")
_HAS_REFERENCE = sa.text("reference IS NOT NULL")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("reserved", sa.BigInteger))
    op.add_column("jobs", sa.Column("price", sa.BigInteger))
    op.create_index("ix_jobs_reserved", "jobs", ["tenant", "reserved"], sqlite_where=_HOLDS, postgresql_where=_HOLDS)
    op.create_table(
        "transfers",
        sa.Column("id", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("seq", sa.BigInteger),
        sa.Column("job_id", sa.Text),
        sa.Column("number", sa.BigInteger),
        sa.Column("model", sa.Text),
        sa.Column("server", sa.Text),
        sa.Column("reserved", sa.BigInteger),
        sa.Column("slot_ms", sa.BigInteger),
        sa.Column("price", sa.BigInteger),
        sa.Column("why", sa.Text),
        sa.Column("actor", sa.Text),
        sa.Column("reference", sa.Text),
        sa.Column("carried", sa.Integer, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transfers")),
        sa.CheckConstraint(
            "kind IN ('grant', 'withdraw', 'reserve', 'settle', 'refund')", name=op.f("ck_transfers_kind")
        ),
        sa.CheckConstraint("amount >= 0", name=op.f("ck_transfers_amount")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_transfers_tenant", "transfers", ["tenant", "id"])
    op.create_index(
        *("uq_transfers_act", "transfers", ["tenant", "reference"]),
        unique=True,
        sqlite_where=_HAS_REFERENCE,
        postgresql_where=_HAS_REFERENCE,
    )
    op.create_index(
        *("uq_transfers_job", "transfers", ["seq", "kind", "number"]),
        unique=True,
        sqlite_where=_OF_JOB,
        postgresql_where=_OF_JOB,
    )
    op.create_table(
        "balance_parts",
        sa.Column("id", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("available", "held", "spent")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_balance_parts")),
    )
    op.create_index("ix_balance_parts_tenant", "balance_parts", ["tenant", "available"])
    op.create_table(
        "credit_accounts",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("overdraft", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("low_mark", sa.BigInteger),
        sa.Column("low_since_ms", sa.BigInteger),
        sa.Column("opened_ms", sa.BigInteger, nullable=False),
        sa.Column("after_transfer", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("spent_before", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("closed_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_credit_accounts")),
        sa.CheckConstraint("overdraft >= 0", name=op.f("ck_credit_accounts_overdraft")),
    )
    op.create_table(
        "prices",
        sa.Column("position", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("model", sa.Text),
        sa.Column("condition", sa.Text, nullable=False, server_default=sa.text("''")),
        sa.Column("per_slot_s", sa.BigInteger, nullable=False),
        sa.Column("reserve_s", sa.Integer, nullable=False, server_default="60"),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_prices")),
        sa.CheckConstraint("per_slot_s >= 0", name=op.f("ck_prices_per_slot_s")),
        sa.CheckConstraint("reserve_s > 0", name=op.f("ck_prices_reserve_s")),
    )


def downgrade() -> None:
    for table in ("prices", "credit_accounts", "balance_parts", "transfers"):
        op.drop_table(table)
    op.drop_index("ix_jobs_reserved", "jobs")
    op.drop_column("jobs", "price")
    op.drop_column("jobs", "reserved")
