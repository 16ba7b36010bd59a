"""The tables of the record.  Times are milliseconds since the epoch, UTC; JSON is text.

Migrations change these on disk; tests/migrations holds the two together.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    text,
)

from jobs.states import ACTIVE, Standing, State

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite counts on by itself only for a plain INTEGER key; there it holds 64 bits all the same.
_Serial = BigInteger().with_variant(Integer, "sqlite")


def _one_of(column: str, words: list[str]) -> str:
    return f"{column} IN ({', '.join(repr(str(word)) for word in words)})"


_EMPTY = text("''")  # Said so, because Alembic takes a plain "" for no default.
QUEUED = "state = 'queued'"
"""Condition of the index of queued jobs; see MAY_EXPIRE."""
_QUEUED = text(QUEUED)
_DUE = text("due_ms IS NOT NULL")
IS_ACTIVE = _one_of("state", sorted(ACTIVE))
MAY_EXPIRE = f"deadline_ms IS NOT NULL AND {IS_ACTIVE}"
"""Condition of the index of deadlines: a query that shall use it says the same."""
_MAY_EXPIRE = text(MAY_EXPIRE)
_FINISHED = text("finished_ms IS NOT NULL")
_PENDING = text("state = 'pending'")


def _standing() -> tuple[Column[Any] | CheckConstraint, ...]:
    """Columns of what can be paused: since when, by whom and why it stands as it does."""
    return (
        Column("state", Text, nullable=False, server_default=Standing.ONLINE.value),
        Column("reason", Text),
        Column("changed_by", Text),
        Column("changed_ms", BigInteger),
        CheckConstraint(_one_of("state", [s.value for s in Standing]), name="state"),
    )


jobs = Table(
    "jobs",
    metadata,
    # Acceptance order.  From the record and not from Redis, so that it survives an emptied Redis (ORDER-1).
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("model", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("why", Text, nullable=False),
    Column("tier", Integer, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("attempt", Integer, nullable=False, server_default="0"),  # starts; the fencing token
    Column("waits", Integer, nullable=False, server_default="0"),  # starts that met no server
    Column("failures", Integer, nullable=False, server_default="0"),
    Column("crashes", Integer, nullable=False, server_default="0"),
    Column("created_ms", BigInteger, nullable=False),
    Column("started_ms", BigInteger),
    Column("finished_ms", BigInteger),
    Column("due_ms", BigInteger),  # delayed: when it may be queued
    Column("deadline_ms", BigInteger),
    Column("server", Text),
    Column("slot", Text),
    Column("lease", Text),  # running: the lease it runs under, so that a lost Redis can be rebuilt
    Column("remote_id", Text),  # the server's own id, stored before the first poll
    Column("sent_ms", BigInteger),  # when the server took it up
    Column("cancel_requested_ms", BigInteger),
    Column("callback_url", Text),
    Column("source", Text, nullable=False),
    Column("error_code", Text),
    Column("error_message", Text),
    Column("envelope", Text),
    Column("payload", Text, nullable=False),
    Column("result", Text),
    Column("needs", Text, nullable=False, server_default=_EMPTY),  # constraints, as routing writes them
    Column("described_by", Text),  # how its run's server is spoken to; see jobs/descriptions.py
    CheckConstraint(_one_of("state", [s.value for s in State]), name="state"),
    CheckConstraint("tier BETWEEN 1 AND 9", name="tier"),
    Index("ix_jobs_state_seq", "state", "seq"),
    Index("ix_jobs_tenant_seq", "tenant", "seq"),
    Index("ix_jobs_model_seq", "model", "seq"),
    Index("ix_jobs_queued", "model", "seq", sqlite_where=_QUEUED, postgresql_where=_QUEUED),
    Index("ix_jobs_due", "due_ms", sqlite_where=_DUE, postgresql_where=_DUE),
    Index("ix_jobs_deadline", "deadline_ms", sqlite_where=_MAY_EXPIRE, postgresql_where=_MAY_EXPIRE),
    Index("ix_jobs_finished", "finished_ms", sqlite_where=_FINISHED, postgresql_where=_FINISHED),
    sqlite_autoincrement=True,
    # Each job is changed thrice and then rests: by its defaults PostgreSQL would look at a fifth, and a tenth, of
    # all that ever ended before it cleans up and counts again.
    postgresql_with={"autovacuum_vacuum_scale_factor": 0.02, "autovacuum_analyze_scale_factor": 0.01},
)

events = Table(
    "events",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    Column("job_id", Text, nullable=False, index=True),
    Column("type", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("data", Text, nullable=False),
    sqlite_autoincrement=True,
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", Text, primary_key=True),
    Column("job_id", Text, nullable=False, index=True),
    Column("url", Text, nullable=False),
    Column("status", Text, nullable=False),  # the state that the job ended in
    Column("state", Text, nullable=False),  # pending, delivered, given_up
    Column("tries", Integer, nullable=False, server_default="0"),
    Column("next_ms", BigInteger, nullable=False),
    Column("last_status", Integer),
    Column("last_error", Text),
    Column("created_ms", BigInteger, nullable=False),
    Column("delivered_ms", BigInteger),
    CheckConstraint(_one_of("state", ["pending", "delivered", "given_up"]), name="state"),
    Index("ix_webhooks_next", "next_ms", sqlite_where=_PENDING, postgresql_where=_PENDING),
)

# Ends of jobs that came with an envelope, until those who wait outside have been told.
tellings = Table(
    "tellings",
    metadata,
    Column("id", Text, primary_key=True),
    Column("job_id", Text, nullable=False, index=True),
    Column("next_ms", BigInteger, nullable=False, index=True),
    Column("created_ms", BigInteger, nullable=False),
)

# Slots whose run has ended here while its server has not let go of it; see jobs/withheld.py.
withheld = Table(
    "withheld",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("server", Text, nullable=False),
    Column("slot", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("remote_id", Text),
    Column("reason", Text, nullable=False),
    Column("began_ms", BigInteger, nullable=False),
    Column("since_ms", BigInteger, nullable=False),
    Column("until_ms", BigInteger, nullable=False),  # the longest
    Column("quiet_ms", BigInteger),  # since when its server's count leaves no room for the run
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("job_id", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("expires_ms", BigInteger, nullable=False, index=True),
)

models = Table(
    "models",
    metadata,
    Column("name", Text, primary_key=True),
    Column("fleet", Text, nullable=False),
    Column("overrides", Text, nullable=False, server_default="{}"),
    Column("created_ms", BigInteger, nullable=False),
    *_standing(),
)

servers = Table(
    "servers",
    metadata,
    Column("name", Text, primary_key=True),
    Column("fleet", Text, nullable=False),
    Column("slots", Integer, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("attributes", Text, nullable=False, server_default="{}"),  # JSON: text -> text or number
    Column("weight", Float, nullable=False, server_default="1"),
    *_standing(),
    CheckConstraint("slots > 0", name="slots"),
    CheckConstraint("weight > 0 AND weight <= 1000", name="weight"),
)

endpoints = Table(
    "endpoints",
    metadata,
    Column("server", Text, ForeignKey("servers.name", ondelete="CASCADE"), primary_key=True),
    Column("model", Text, ForeignKey("models.name"), primary_key=True),
    Column("url", Text, nullable=False),
    Column("overrides", Text, nullable=False, server_default="{}"),  # JSON: what differs there from the model's own
)

# How servers are spoken to; see jobs/descriptions.py.  A row never changes but in `idle_ms`.
descriptions = Table(
    "descriptions",
    metadata,
    Column("version", Text, primary_key=True),  # of the body
    Column("body", Text, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("idle_ms", BigInteger),  # since when nothing names it
)

# What descriptions name and nobody is shown; see jobs/secrets.py.
secrets = Table(
    "secrets",
    metadata,
    Column("name", Text, primary_key=True),
    Column("models", Text),  # JSON: those whose descriptions may name it; null: all
    Column("sealed", Text, nullable=False),
    Column("set_by", Text),
    Column("set_ms", BigInteger, nullable=False),
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", Text, primary_key=True),
    Column("key_hash", Text, nullable=False, unique=True),
    Column("admin", Integer, nullable=False, server_default="0"),
    Column("rate_per_s", Integer),
    Column("burst", Integer),
    Column("created_ms", BigInteger, nullable=False),
)

# Tenants that do not stand online; one needs no key to be here.
tenant_states = Table("tenant_states", metadata, Column("name", Text, primary_key=True), *_standing())

# How many jobs were accepted, in parts to be added up.  On PostgreSQL a trigger (migration 0007) adds a part with each
# INSERT into `jobs`; on SQLite this is empty, and the jobs' numbers tell.
accepted = Table("accepted", metadata, Column("jobs", BigInteger, nullable=False))

# Small numbers that must change in the transaction of what they count.
counters = Table(
    "counters",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)
