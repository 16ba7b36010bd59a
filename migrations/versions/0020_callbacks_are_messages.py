"""Messages to jobs' `callback_url` stand among those of webhooks.

Revision: 0020, after: 0019

What is pending or was given up is moved, under the ids that it had; what was delivered is not kept.  The release before
goes on beside it: a view takes what it writes of ends, and shows it nothing to send; the processes of this release
send that.  The view goes with a later step, when no process of the release before can run any more.
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_OWN_PENDING = sa.text("state = 'pending' AND receiver = job_id")
_OWN_GIVEN_UP = sa.text("state = 'given_up' AND receiver = job_id")
_PENDING, _GIVEN_UP = sa.text("state = 'pending'"), sa.text("state = 'given_up'")
_COLUMNS = "receiver, event, job_id, type, at_ms, state, tries, next_ms, owed_ms, ended_ms, last_status, last_error"
_OLD_COLUMNS = "id, job_id, url, status, state, tries, next_ms, last_status, last_error, created_ms, delivered_ms"
_ENDS = ("dead", "completed", "failed", "expired", "canceled")  # slotkeeper/jobs/notifications.py


def _number(row: str) -> str:
    """The number of the end that the id `msg_{job}_{attempt}_{status}` names."""
    attempt = (
        f"substr({row}id, length({row}job_id) + 6, length({row}id) - length({row}job_id) - length({row}status) - 6)"
    )
    which = " ".join(f"WHEN '{end}' THEN {n}" for n, end in enumerate(_ENDS))
    return f"CAST({attempt} AS BIGINT) * 10 + CASE {row}status {which} END"


def _moved(row: str = "") -> str:
    """A row of callbacks as one of messages."""
    return (
        f"{row}job_id, {_number(row)}, {row}job_id, "
        f"CASE {row}status WHEN 'dead' THEN 'job.dlq' ELSE 'job.' || {row}status END, "
        f"{row}created_ms, {row}state, coalesce({row}tries, 0), {row}next_ms, {row}created_ms, "
        f"CASE {row}state WHEN 'given_up' THEN coalesce(nullif({row}next_ms, 0), {row}created_ms) END, "
        f"{row}last_status, {row}last_error"
    )


_OLD = (
    "SELECT receiver AS id, job_id, '' AS url, type AS status, state, tries, next_ms, last_status, last_error, "
    "at_ms AS created_ms, ended_ms AS delivered_ms FROM messages WHERE false"
)
_TAKEN = f"INSERT INTO messages ({_COLUMNS}) SELECT {_moved('NEW.')}"
_VIEW = {
    "sqlite": (
        f"CREATE VIEW webhooks AS {_OLD}",
        f"CREATE TRIGGER webhooks_taken INSTEAD OF INSERT ON webhooks BEGIN {_TAKEN}; END",
        *(
            f"CREATE TRIGGER webhooks_{act.lower()} INSTEAD OF {act} ON webhooks BEGIN SELECT 1; END"
            for act in ("UPDATE", "DELETE")
        ),
    ),
    "postgresql": (
        f"CREATE VIEW webhooks AS {_OLD}",
        f"""
CREATE FUNCTION slotkeeper_take_callback() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    {_TAKEN};
    RETURN NEW;
END $$
""",
        "CREATE TRIGGER slotkeeper_callbacks INSTEAD OF INSERT ON webhooks FOR EACH ROW "
        "EXECUTE FUNCTION slotkeeper_take_callback()",
    ),
}


def upgrade() -> None:
    op.create_index(
        *("ix_messages_due", "messages", ["next_ms", "receiver", "event"]),
        sqlite_where=_OWN_PENDING,
        postgresql_where=_OWN_PENDING,
    )
    op.create_index(
        *("ix_messages_given_up", "messages", ["at_ms", "receiver", "event"]),
        sqlite_where=_OWN_GIVEN_UP,
        postgresql_where=_OWN_GIVEN_UP,
    )
    if _is_postgresql():
        op.execute("LOCK TABLE webhooks IN ACCESS EXCLUSIVE MODE")
    op.execute(f"INSERT INTO messages ({_COLUMNS}) SELECT {_moved()} FROM webhooks WHERE state <> 'delivered'")
    op.drop_table("webhooks")
    for statement in _VIEW[op.get_bind().dialect.name]:
        op.execute(statement)


def _is_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def downgrade() -> None:
    """Forgets what was delivered."""
    op.execute("DROP VIEW webhooks")
    if _is_postgresql():
        op.execute("DROP FUNCTION slotkeeper_take_callback()")
    op.create_table(
        "webhooks",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("tries", sa.Integer, nullable=False, server_default="0"),
        sa.Column("next_ms", sa.BigInteger, nullable=False),
        sa.Column("last_status", sa.Integer),
        sa.Column("last_error", sa.Text),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("delivered_ms", sa.BigInteger),
        sa.CheckConstraint("state IN ('pending', 'delivered', 'given_up')", name=op.f("ck_webhooks_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_index("ix_webhooks_job_id", "webhooks", ["job_id"])
    op.create_index("ix_webhooks_next", "webhooks", ["next_ms"], sqlite_where=_PENDING, postgresql_where=_PENDING)
    op.create_index(
        *("ix_webhooks_given_up", "webhooks", ["created_ms", "id"]),
        sqlite_where=_GIVEN_UP,
        postgresql_where=_GIVEN_UP,
    )
    status = "CASE type WHEN 'job.dlq' THEN 'dead' ELSE substr(type, 5) END"
    op.execute(
        f"INSERT INTO webhooks ({_OLD_COLUMNS}) "
        f"SELECT 'msg_' || job_id || '_' || CAST(event / 10 AS TEXT) || '_' || {status}, job_id, "
        f"(SELECT callback_url FROM jobs WHERE jobs.id = messages.job_id), {status}, messages.state, tries, "
        "CASE messages.state WHEN 'given_up' THEN coalesce(ended_ms, 0) ELSE next_ms END, "
        "last_status, last_error, at_ms, NULL FROM messages WHERE receiver = job_id"
    )
    op.execute("DELETE FROM messages WHERE receiver = job_id")
    op.execute("DELETE FROM tries WHERE receiver = job_id")
    op.drop_index("ix_messages_given_up", "messages")
    op.drop_index("ix_messages_due", "messages")
