"""The record: jobs, events, webhooks, keys, and the catalog of models, servers and tenants.

Revision: 0001, after: nothing
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _where(condition: str) -> dict[str, Any]:
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


def upgrade() -> None:
    op.create_table(
        "counters",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_counters")),
    )
    op.create_table(
        "events",
        sa.Column("id", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_job_id", "events", ["job_id"])

    op.create_table(
        "idempotency_keys",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index("ix_idempotency_keys_expires_ms", "idempotency_keys", ["expires_ms"])

    op.create_table(
        "jobs",
        sa.Column("seq", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, server_default="0", nullable=False),
        sa.Column("waits", sa.Integer, server_default="0", nullable=False),
        sa.Column("failures", sa.Integer, server_default="0", nullable=False),
        sa.Column("crashes", sa.Integer, server_default="0", nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("started_ms", sa.BigInteger),
        sa.Column("finished_ms", sa.BigInteger),
        sa.Column("due_ms", sa.BigInteger),
        sa.Column("deadline_ms", sa.BigInteger),
        sa.Column("server", sa.Text),
        sa.Column("slot", sa.Text),
        sa.Column("lease", sa.Text),
        sa.Column("remote_id", sa.Text),
        sa.Column("sent_ms", sa.BigInteger),
        sa.Column("cancel_requested_ms", sa.BigInteger),
        sa.Column("callback_url", sa.Text),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("error_code", sa.Text),
        sa.Column("error_message", sa.Text),
        sa.Column("envelope", sa.Text),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("result", sa.Text),
        sa.CheckConstraint(
            "state IN ('queued', 'delayed', 'running', 'completed', 'failed', 'expired', 'canceled', 'dead')",
            name=op.f("ck_jobs_state"),
        ),
        sa.CheckConstraint("priority BETWEEN 1 AND 9", name=op.f("ck_jobs_priority")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_jobs_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_jobs_deadline",
        "jobs",
        ["deadline_ms"],
        **_where("deadline_ms IS NOT NULL AND state IN ('delayed', 'queued', 'running')"),
    )
    op.create_index("ix_jobs_due", "jobs", ["due_ms"], **_where("due_ms IS NOT NULL"))
    op.create_index("ix_jobs_finished", "jobs", ["finished_ms"], **_where("finished_ms IS NOT NULL"))
    op.create_index("ix_jobs_state_seq", "jobs", ["state", "seq"])

    op.create_table(
        "models",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("fleet", sa.Text, nullable=False),
        sa.Column("overrides", sa.Text, server_default="{}", nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_models")),
    )
    op.create_table(
        "servers",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("fleet", sa.Text, nullable=False),
        sa.Column("slots", sa.Integer, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.CheckConstraint("state IN ('online', 'draining', 'paused')", name=op.f("ck_servers_state")),
        sa.CheckConstraint("slots > 0", name=op.f("ck_servers_slots")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_servers")),
    )
    op.create_table(
        "tenants",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("key_hash", sa.Text, nullable=False),
        sa.Column("admin", sa.Integer, server_default="0", nullable=False),
        sa.Column("rate_per_s", sa.Integer),
        sa.Column("burst", sa.Integer),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_tenants")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_tenants_key_hash")),
    )
    op.create_table(
        "webhooks",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("tries", sa.Integer, server_default="0", nullable=False),
        sa.Column("next_ms", sa.BigInteger, nullable=False),
        sa.Column("last_status", sa.Integer),
        sa.Column("last_error", sa.Text),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("delivered_ms", sa.BigInteger),
        sa.CheckConstraint("state IN ('pending', 'delivered', 'given_up')", name=op.f("ck_webhooks_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_index("ix_webhooks_job_id", "webhooks", ["job_id"])
    op.create_index("ix_webhooks_next", "webhooks", ["next_ms"], **_where("state = 'pending'"))

    op.create_table(
        "endpoints",
        sa.Column("server", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_endpoints_model")),
        sa.ForeignKeyConstraint(["server"], ["servers.name"], name=op.f("fk_endpoints_server"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("server", "model", name=op.f("pk_endpoints")),
    )


def downgrade() -> None:
    raise RuntimeError(
        "0001 creates the record, so going back would delete every job. "
        "Restore a backup, or point SLOTKEEPER_DATABASE_URL to another database."
    )
