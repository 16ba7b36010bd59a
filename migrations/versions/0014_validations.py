"""Validations: jobs with known answers that find servers which answer wrongly; and what their answers were.

Revision: 0014, after: 0013
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None
drops = ("validations", "validation_answers")  # by its downgrade, with their content


def upgrade() -> None:
    op.create_table(
        "validations",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("expected", sa.Text, nullable=False),
        sa.Column("compare", sa.Text, nullable=False, server_default="subset"),
        sa.Column("tolerance", sa.Float, nullable=False, server_default="0"),
        sa.Column("every_s", sa.Integer, nullable=False),
        sa.Column("enabled", sa.Integer, nullable=False, server_default="1"),
        sa.Column("next_ms", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("changed_by", sa.Text),
        sa.Column("changed_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_validations")),
        sa.CheckConstraint("compare IN ('equal', 'subset', 'close')", name=op.f("ck_validations_compare")),
        sa.CheckConstraint("every_s > 0", name=op.f("ck_validations_every_s")),
    )
    op.create_table(
        "validation_answers",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("validation", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("server", sa.Text),
        sa.Column("outcome", sa.Text, nullable=False, server_default="awaited"),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("detail", sa.Text),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_validation_answers")),
        sa.CheckConstraint(
            "outcome IN ('awaited', 'right', 'wrong', 'none')", name=op.f("ck_validation_answers_outcome")
        ),
    )
    op.create_index("ix_validation_answers_server", "validation_answers", ["server", "at_ms"])
    op.create_index("ix_validation_answers_outcome", "validation_answers", ["outcome", "at_ms"])


def downgrade() -> None:
    op.drop_table("validation_answers")
    op.drop_table("validations")
