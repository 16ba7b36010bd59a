"""All tables, indexes and triggers.

Revision: 0001, after: nothing
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# SQLite numbers rows by itself only for a plain INTEGER key; there it holds 64 bits all the same.
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

# An audit entry is never changed, and is deleted only when retention has set its age limit past it.
_MAY_DELETE = "OLD.at_ms < coalesce((SELECT value FROM counters WHERE name = 'events.of_age_ms'), 0)"
_SQLITE_TRIGGERS = (
    "CREATE TRIGGER acts_are_not_changed BEFORE UPDATE ON events WHEN OLD.actor IS NOT NULL "
    "BEGIN SELECT RAISE(ABORT, 'acts are not changed'); END",
    "CREATE TRIGGER acts_are_not_removed BEFORE DELETE ON events "
    f"WHEN OLD.actor IS NOT NULL AND NOT ({_MAY_DELETE}) "
    "BEGIN SELECT RAISE(ABORT, 'acts are not removed before their time'); END",
)
_POSTGRESQL_TRIGGERS = (
    f"""
CREATE FUNCTION slotkeeper_keep_acts() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF {_MAY_DELETE} THEN RETURN OLD; END IF;
    END IF;
    RAISE EXCEPTION 'acts are not changed, nor removed before their time' USING ERRCODE = 'restrict_violation';
END $$
""",
    "CREATE TRIGGER slotkeeper_acts BEFORE UPDATE OR DELETE ON events FOR EACH ROW WHEN (OLD.actor IS NOT NULL) "
    "EXECUTE FUNCTION slotkeeper_keep_acts()",
    "CREATE TRIGGER slotkeeper_all_acts BEFORE TRUNCATE ON events FOR EACH STATEMENT "
    "EXECUTE FUNCTION slotkeeper_keep_acts()",
    # Counts accepted jobs (JOB-3).  Each INSERT adds a row of its own, so no submit waits for another's.
    """
CREATE FUNCTION slotkeeper_count_accepted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO accepted (jobs) SELECT count(*) FROM added HAVING count(*) > 0;
    RETURN NULL;
END $$
""",
    "CREATE TRIGGER slotkeeper_accepted AFTER INSERT ON jobs "
    "REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION slotkeeper_count_accepted()",
)


def _where(condition: str) -> dict[str, Any]:
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


def upgrade() -> None:
    op.create_table("accepted", sa.Column("jobs", sa.BigInteger, nullable=False))
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
        "counters",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_counters")),
    )
    op.create_table(
        "defaults",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("overrides", sa.Text, server_default="{}", nullable=False),
        sa.Column("changed_by", sa.Text),
        sa.Column("changed_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_defaults")),
    )
    op.create_table(
        "descriptions",
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("idle_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_descriptions")),
    )
    op.create_table(
        "events",
        sa.Column("id", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sa.Column("model", sa.Text),
        sa.Column("tenant", sa.Text),
        sa.Column("priority", sa.Integer),
        sa.Column("server", sa.Text),
        sa.Column("actor", sa.Text),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_acts", "events", ["id"], **_where("actor IS NOT NULL"))
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
        sa.Column("constraints", sa.Text, server_default=sa.text("''"), nullable=False),
        sa.Column("described_by", sa.Text),
        sa.Column("traceparent", sa.Text),
        sa.Column("batch", sa.Text),
        sa.Column("sent_to", sa.Text),
        sa.CheckConstraint(
            "state IN ('queued', 'delayed', 'running', 'completed', 'failed', 'expired', 'canceled', 'dead')",
            name=op.f("ck_jobs_state"),
        ),
        sa.CheckConstraint("priority BETWEEN 1 AND 9", name=op.f("ck_jobs_priority")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_jobs_id")),
        postgresql_with={"autovacuum_vacuum_scale_factor": 0.02, "autovacuum_analyze_scale_factor": 0.01},
        sqlite_autoincrement=True,
    )
    # SQLite, without statistics, prefers the index that was created last: so partial indexes come after whole ones.
    op.create_index(
        "ix_jobs_deadline",
        "jobs",
        ["deadline_ms"],
        **_where("deadline_ms IS NOT NULL AND state IN ('delayed', 'queued', 'running')"),
    )
    op.create_index("ix_jobs_due", "jobs", ["due_ms"], **_where("due_ms IS NOT NULL"))
    op.create_index("ix_jobs_finished", "jobs", ["finished_ms"], **_where("finished_ms IS NOT NULL"))
    op.create_index("ix_jobs_state_seq", "jobs", ["state", "seq"])
    op.create_index("ix_jobs_tenant_seq", "jobs", ["tenant", "seq"])
    op.create_index("ix_jobs_model_seq", "jobs", ["model", "seq"])
    op.create_index("ix_jobs_queued", "jobs", ["model", "seq"], **_where("state = 'queued'"))
    op.create_index("ix_jobs_batch_seq", "jobs", ["batch", "seq"], **_where("batch IS NOT NULL"))
    op.create_index("ix_jobs_tenant_batch", "jobs", ["tenant", "batch"], **_where("batch IS NOT NULL"))
    op.create_index("ix_jobs_id_end", "jobs", [sa.text("substr(id, 29)")])
    op.create_index("ix_jobs_to_be_resumed", "jobs", ["seq"], **_where("state = 'queued' AND slot IS NOT NULL"))
    op.create_table(
        "messages",
        sa.Column("receiver", sa.Text, nullable=False),
        sa.Column("event", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, server_default="pending", nullable=False),
        sa.Column("tries", sa.Integer, server_default="0", nullable=False),
        sa.Column("next_ms", sa.BigInteger, nullable=False),
        sa.Column("owed_ms", sa.BigInteger, nullable=False),
        sa.Column("ended_ms", sa.BigInteger),
        sa.Column("last_status", sa.Integer),
        sa.Column("last_error", sa.Text),
        sa.CheckConstraint("state IN ('pending', 'given_up')", name=op.f("ck_messages_state")),
        sa.PrimaryKeyConstraint("receiver", "event", name=op.f("pk_messages")),
    )
    op.create_index(
        "ix_messages_due",
        "messages",
        ["next_ms", "receiver", "event"],
        **_where("state = 'pending' AND receiver = job_id"),
    )
    op.create_index(
        "ix_messages_given_up",
        "messages",
        ["at_ms", "receiver", "event"],
        **_where("state = 'given_up' AND receiver = job_id"),
    )
    op.create_index("ix_messages_job", "messages", ["job_id", "receiver", "event"])
    op.create_index("ix_messages_next", "messages", ["receiver", "next_ms"], **_where("state = 'pending'"))
    op.create_table(
        "models",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("fleet", sa.Text, nullable=False),
        sa.Column("overrides", sa.Text, server_default="{}", nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, server_default="online", nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("changed_by", sa.Text),
        sa.Column("changed_ms", sa.BigInteger),
        sa.CheckConstraint("state IN ('online', 'paused', 'draining', 'frozen')", name=op.f("ck_models_state")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_models")),
    )
    op.create_table(
        "quarantined_slots",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("server", sa.Text, nullable=False),
        sa.Column("slot", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("remote_id", sa.Text),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("began_ms", sa.BigInteger, nullable=False),
        sa.Column("since_ms", sa.BigInteger, nullable=False),
        sa.Column("until_ms", sa.BigInteger, nullable=False),
        sa.Column("quiet_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("job_id", "attempt", name=op.f("pk_quarantined_slots")),
    )
    op.create_table(
        "receivers",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("types", sa.Text, nullable=False),
        sa.Column("template", sa.Text),
        sa.Column("description", sa.Text, server_default=sa.text("''"), nullable=False),
        sa.Column("sealed", sa.Text, nullable=False),
        sa.Column("former_sealed", sa.Text),
        sa.Column("former_until_ms", sa.BigInteger),
        sa.Column("state", sa.Text, server_default="enabled", nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("changed_by", sa.Text),
        sa.Column("changed_ms", sa.BigInteger),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("after_event", sa.BigInteger, nullable=False),
        sa.Column("behind", sa.BigInteger),
        sa.Column("failures", sa.Integer, server_default="0", nullable=False),
        sa.Column("failing_since_ms", sa.BigInteger),
        sa.Column("open_until_ms", sa.BigInteger, server_default="0", nullable=False),
        sa.Column("max_per_s", sa.Float()),
        sa.Column("paced_until_us", sa.BigInteger, server_default="0", nullable=False),
        sa.CheckConstraint("state IN ('enabled', 'disabled')", name=op.f("ck_receivers_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_receivers")),
    )
    op.create_index("ix_receivers_tenant", "receivers", ["tenant"])
    op.create_table(
        "relays",
        sa.Column("sink", sa.Text, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.Text),
        sa.Column("until_ms", sa.BigInteger, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("sink", name=op.f("pk_relays")),
    )
    op.create_table(
        "result_notifications",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("next_ms", sa.BigInteger, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_result_notifications")),
    )
    op.create_index("ix_result_notifications_job_id", "result_notifications", ["job_id"])
    op.create_index("ix_result_notifications_next_ms", "result_notifications", ["next_ms"])
    op.create_table(
        "revoked_sessions",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("until_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_revoked_sessions")),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("models", sa.Text),
        sa.Column("sealed", sa.Text, nullable=False),
        sa.Column("set_by", sa.Text),
        sa.Column("set_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_secrets")),
    )
    op.create_table(
        "servers",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("fleet", sa.Text, nullable=False),
        sa.Column("slots", sa.Integer, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("attributes", sa.Text, server_default="{}", nullable=False),
        sa.Column("weight", sa.Float(), server_default="1", nullable=False),
        sa.Column("state", sa.Text, server_default="online", nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("changed_by", sa.Text),
        sa.Column("changed_ms", sa.BigInteger),
        sa.Column("leaving_ms", sa.BigInteger),
        sa.Column("leaving_by", sa.Text),
        sa.CheckConstraint("state IN ('online', 'paused', 'draining', 'frozen')", name=op.f("ck_servers_state")),
        sa.CheckConstraint("slots > 0", name=op.f("ck_servers_slots")),
        sa.CheckConstraint("weight > 0 AND weight <= 1000", name=op.f("ck_servers_weight")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_servers")),
    )
    op.create_table(
        "tenant_states",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("state", sa.Text, server_default="online", nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("changed_by", sa.Text),
        sa.Column("changed_ms", sa.BigInteger),
        sa.CheckConstraint("state IN ('online', 'paused', 'draining', 'frozen')", name=op.f("ck_tenant_states_state")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_tenant_states")),
    )
    op.create_table(
        "tenants",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("key_hash", sa.Text, nullable=False),
        sa.Column("admin", sa.Integer, server_default="0", nullable=False),
        sa.Column("rights", sa.Text, server_default=sa.text("''"), nullable=False),
        sa.Column("rate_per_s", sa.Integer),
        sa.Column("burst", sa.Integer),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("former_hash", sa.Text),
        sa.Column("former_until_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_tenants")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_tenants_key_hash")),
    )
    op.create_index("ix_tenants_former_hash", "tenants", ["former_hash"])
    op.create_table(
        "tries",
        sa.Column("id", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("receiver", sa.Text, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("latency_ms", sa.Integer, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("answer", sa.Text),
        sa.Column("inside", sa.Integer, server_default="0", nullable=False),
        sa.CheckConstraint("outcome IN ('delivered', 'failed', 'given_up')", name=op.f("ck_tries_outcome")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tries")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_tries_receiver", "tries", ["receiver", "id"])
    op.create_table(
        "endpoints",
        sa.Column("server", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("overrides", sa.Text, server_default="{}", nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_endpoints_model")),
        sa.ForeignKeyConstraint(["server"], ["servers.name"], name=op.f("fk_endpoints_server"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("server", "model", name=op.f("pk_endpoints")),
    )

    on_postgresql = op.get_bind().dialect.name == "postgresql"
    for statement in _POSTGRESQL_TRIGGERS if on_postgresql else _SQLITE_TRIGGERS:
        op.execute(statement)


def downgrade() -> None:
    raise RuntimeError(
        "0001 creates the tables, so going back would delete every job. "
        "Restore a backup, or point SLOTKEEPER_DATABASE_URL to another database."
    )
