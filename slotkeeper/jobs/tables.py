"""The tables of jobs.  Times are milliseconds since the epoch, UTC; JSON is text.

Migrations change these on disk; tests/system/upgrade holds the two together.
"""

from sqlalchemy import BigInteger, CheckConstraint, Column, Index, Integer, Table, Text, text

from slotkeeper.db.schema import EMPTY_TEXT, SERIAL, metadata, one_of_check
from slotkeeper.jobs.states import ACTIVE_STATES, State

QUEUED_CONDITION = "state = 'queued'"
"""Condition of the index of queued jobs; see EXPIRABLE_CONDITION."""
_QUEUED = text(QUEUED_CONDITION)
RESUMABLE_CONDITION = f"{QUEUED_CONDITION} AND slot IS NOT NULL"
"""Condition of the index of queued jobs that have a slot; see EXPIRABLE_CONDITION."""
_TO_BE_RESUMED = text(RESUMABLE_CONDITION)
_DUE = text("due_ms IS NOT NULL")
ACTIVE_CONDITION = one_of_check("state", sorted(ACTIVE_STATES))
EXPIRABLE_CONDITION = f"deadline_ms IS NOT NULL AND {ACTIVE_CONDITION}"
"""Condition of the index of deadlines: a query that uses it must have the same text."""
_MAY_EXPIRE = text(EXPIRABLE_CONDITION)
_FINISHED = text("finished_ms IS NOT NULL")
_PENDING = text("state = 'pending'")
_OWN_PENDING = text("state = 'pending' AND receiver = job_id")
_OWN_GIVEN_UP = text("state = 'given_up' AND receiver = job_id")
_IS_ACT = text("actor IS NOT NULL")
_IN_BATCH = text("batch IS NOT NULL")
_UNFINISHED = text("state IN ('open', 'closed')")
_HAS_KEY = text("key IS NOT NULL")
_HOLDS_CREDITS = text("reserved > 0")
_OF_JOB = text("seq IS NOT NULL")
_HAS_REFERENCE = text("reference IS NOT NULL")

TRANSFER_KINDS = ("grant", "withdraw", "reserve", "settle", "refund")
"""The kinds of transfers; see slotkeeper/jobs/credits.py."""
ID_SUFFIX = "substr(id, 29)"
"""The last 8 characters of a UUID, as its index has them: a query that uses it must have the same text."""


# Signed envelopes of results that nodes returned; see envelopes.py.
envelopes = Table(
    "envelopes",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("node", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("text", Text, nullable=False),  # JSON
    Column("at_ms", BigInteger, nullable=False),
)

jobs = Table(
    "jobs",
    metadata,
    # Acceptance number.  The database assigns it, so that the order survives an emptied Redis (ORDER-1).
    Column("seq", SERIAL, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("model", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("why", Text, nullable=False),
    Column("priority", Integer, nullable=False),
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
    # Which of `not_before` and `deadline` the client gave as times; see slotkeeper/db/moved_times.py.
    Column("given_times", Text),
    Column("server", Text),
    Column("slot", Text),
    Column("lease", Text),  # running: the lease it runs under, so that a lost Redis can be rebuilt
    Column("remote_id", Text),  # the server's own id, stored before the first poll
    # When the server took it up; of a run to be resumed, when its request was sent; 0: an operator says it has ended.
    Column("sent_ms", BigInteger),
    Column("cancel_requested_ms", BigInteger),
    Column("callback_url", Text),
    Column("source", Text, nullable=False),
    Column("error_code", Text),
    Column("error_message", Text),
    Column("envelope", Text),
    Column("payload", Text, nullable=False),
    Column("result", Text),
    Column("constraints", Text, nullable=False, server_default=EMPTY_TEXT),  # in routing's canonical text
    Column("labels", Text, nullable=False, server_default=EMPTY_TEXT),  # in routing's canonical text
    Column("described_by", Text),  # how its run's server is called; see slotkeeper/registry/server_descriptions.py
    Column("traceparent", Text),  # of the trace in which it was submitted; see slotkeeper/trace_context.py
    Column("batch", Text),  # name of the batch in which it was submitted
    Column("terms", Text),  # JSON of what few jobs have, see slotkeeper/jobs/terms.py; null: nothing
    Column("sent_to", Text),  # running, or to be resumed: its server's address when the run began
    Column("reserved", BigInteger),  # micro-credits held for it; below 0: settled; null: it costs nothing
    # Micro-credits a slot-second: at accept the highest that may apply, from a start on that of its server, if lower.
    Column("price", BigInteger),
    CheckConstraint(one_of_check("state", [s.value for s in State]), name="state"),
    CheckConstraint("priority BETWEEN 1 AND 9", name="priority"),
    Index("ix_jobs_state_seq", "state", "seq"),
    Index("ix_jobs_tenant_seq", "tenant", "seq"),
    Index("ix_jobs_model_seq", "model", "seq"),
    Index("ix_jobs_queued", "model", "seq", sqlite_where=_QUEUED, postgresql_where=_QUEUED),
    Index("ix_jobs_to_be_resumed", "seq", sqlite_where=_TO_BE_RESUMED, postgresql_where=_TO_BE_RESUMED),
    Index("ix_jobs_due", "due_ms", sqlite_where=_DUE, postgresql_where=_DUE),
    Index("ix_jobs_deadline", "deadline_ms", sqlite_where=_MAY_EXPIRE, postgresql_where=_MAY_EXPIRE),
    Index("ix_jobs_finished", "finished_ms", sqlite_where=_FINISHED, postgresql_where=_FINISHED),
    Index("ix_jobs_batch_seq", "batch", "seq", sqlite_where=_IN_BATCH, postgresql_where=_IN_BATCH),
    # Counts the jobs of a batch by state, without reading them.
    Index(
        *("ix_jobs_tenant_batch", "tenant", "batch", "state", "seq"),
        sqlite_where=_IN_BATCH,
        postgresql_where=_IN_BATCH,
    ),
    Index("ix_jobs_id_end", text(ID_SUFFIX)),
    Index("ix_jobs_reserved", "tenant", "reserved", sqlite_where=_HOLDS_CREDITS, postgresql_where=_HOLDS_CREDITS),
    sqlite_autoincrement=True,
    # Each job is changed three times and then never again.  By its defaults PostgreSQL would vacuum and analyze only
    # after a fifth, and a tenth, of all jobs that ever ended had changed.
    postgresql_with={"autovacuum_vacuum_scale_factor": 0.02, "autovacuum_analyze_scale_factor": 0.01},
)

JOB_COLUMNS = tuple(column.label(column.key) for column in jobs.c)
"""All columns of a job, with the names that the code uses."""

# Each label of each job, `name=value`, for lists by label.  Triggers (migrations) write and delete the rows.
job_labels = Table(
    "job_labels",
    metadata,
    Column("label", Text, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant", Text, nullable=False),
    Index("ix_job_labels_tenant_label_seq", "tenant", "label", "seq"),
    sqlite_with_rowid=False,
)

events = Table(
    "events",
    metadata,
    Column("id", SERIAL, primary_key=True, autoincrement=True),
    Column("job_id", Text, nullable=False, index=True),
    Column("type", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("data", Text, nullable=False),
    # Of the job at that time; the job may have been deleted since.  Null: the event concerns none.
    Column("model", Text),
    Column("tenant", Text),
    Column("priority", Integer),
    Column("server", Text),
    Column("actor", Text),  # of an entry of the audit log; null: any other event
    Index("ix_events_acts", "id", sqlite_where=_IS_ACT, postgresql_where=_IS_ACT),
    sqlite_autoincrement=True,
)

# Undelivered messages of webhooks, pending or given up; see slotkeeper/outbox/webhook_messages.py.
messages = Table(
    "messages",
    metadata,
    # The id of a webhook (slotkeeper/outbox/tables.py), or of the job whose `callback_url` it is.
    Column("receiver", Text, primary_key=True),
    # The event's number; for a `callback_url` see slotkeeper/jobs/notifications.py; negative: a test message.
    Column("event", BigInteger, primary_key=True, autoincrement=False),
    Column("job_id", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),  # when it happened
    Column("state", Text, nullable=False, server_default="pending"),
    Column("tries", Integer, nullable=False, server_default="0"),
    Column("next_ms", BigInteger, nullable=False),
    Column("owed_ms", BigInteger, nullable=False),
    Column("ended_ms", BigInteger),
    Column("last_status", Integer),
    Column("last_error", Text),
    CheckConstraint(one_of_check("state", ["pending", "given_up"]), name="state"),
    Index("ix_messages_job", "job_id", "receiver", "event"),
    Index("ix_messages_next", "receiver", "next_ms", sqlite_where=_PENDING, postgresql_where=_PENDING),
    Index("ix_messages_due", "next_ms", "receiver", "event", sqlite_where=_OWN_PENDING, postgresql_where=_OWN_PENDING),
    Index(
        *("ix_messages_given_up", "at_ms", "receiver", "event"),
        sqlite_where=_OWN_GIVEN_UP,
        postgresql_where=_OWN_GIVEN_UP,
    ),
)

# Ends of jobs that Celery's clients sent, until these have been notified.
result_notifications = Table(
    "result_notifications",
    metadata,
    Column("id", Text, primary_key=True),
    Column("job_id", Text, nullable=False, index=True),
    Column("next_ms", BigInteger, nullable=False, index=True),
    Column("created_ms", BigInteger, nullable=False),
)

# Slots whose run has ended here while the server has not released it; see slotkeeper/jobs/quarantine.py.
quarantined_slots = Table(
    "quarantined_slots",
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
    Column("quiet_ms", BigInteger),  # since when the server reports too few runs for this one to be among them
)

# Which filling of a fleet's queue in Redis may start jobs; see slotkeeper/jobs/queue_epochs.py.
queue_epochs = Table(
    "queue_epochs",
    metadata,
    Column("fleet", Text, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("filling", Text, nullable=False),  # random name of the filling that has this number
    Column("store", Text, nullable=False, server_default="main"),  # the Redis in which it is
    Column("format", Integer, nullable=False),  # of its keys; see slotkeeper/redis/keys.py
    Column("since_ms", BigInteger, nullable=False),
)

# Batches; see batches.py.  What came of their jobs is counted in `jobs`.
batches = Table(
    "batches",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("state", Text, nullable=False),
    Column("name", Text),
    Column("key", Text),  # Idempotency-Key
    Column("fingerprint", Text),  # hash of the head, compared when the key is used again
    Column("on_error", Text, nullable=False, server_default="skip"),
    Column("head", Text, nullable=False, server_default="{}"),  # JSON: what lines inherit
    Column("callback_url", Text),
    Column("deadline_ms", BigInteger),
    Column("lines", Integer, nullable=False, server_default="0"),  # received; the next line has this number
    Column("refused", Integer, nullable=False, server_default="0"),  # of these
    Column("paused", Integer, nullable=False, server_default="0"),
    Column("has_held", Integer, nullable=False, server_default="0"),  # 1: some of its jobs may be on hold
    Column("created_ms", BigInteger, nullable=False),
    Column("changed_ms", BigInteger, nullable=False),  # when its last line came
    Column("closed_ms", BigInteger),
    Column("cancel_ms", BigInteger),  # when its cancellation was requested
    Column("ended_ms", BigInteger),
    Column("ends", Text),  # JSON: number of jobs in each state at its end
    CheckConstraint(one_of_check("state", ["named", "open", "closed", "ended"]), name="state"),
    CheckConstraint(one_of_check("on_error", ["skip", "refuse"]), name="on_error"),
    Index("ix_batches_id", "id"),
    Index("ix_batches_unfinished", "created_ms", sqlite_where=_UNFINISHED, postgresql_where=_UNFINISHED),
    Index("uq_batches_key", "tenant", "key", unique=True, sqlite_where=_HAS_KEY, postgresql_where=_HAS_KEY),
)

# Lines of batches that were refused.
batch_errors = Table(
    "batch_errors",
    metadata,
    Column("batch", Text, primary_key=True),
    Column("line", Integer, primary_key=True, autoincrement=False),
    Column("custom_id", Text),
    Column("code", Text, nullable=False),
    Column("field", Text),
    Column("message", Text, nullable=False),
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

# Names of models under which the database accepts no jobs; see slotkeeper/jobs/closed_models.py.
closed_models = Table(
    "closed_models",
    metadata,
    Column("name", Text, primary_key=True),
    Column("because", Text, nullable=False),
    Column("changed_by", Text),
    Column("changed_ms", BigInteger, nullable=False),
    CheckConstraint(one_of_check("because", ["removing", "removed"]), name="because"),
)

# The number of accepted jobs, as the sum of all rows.  On PostgreSQL a trigger (migrations) adds a row for each INSERT
# into `jobs`; on SQLite the table is empty, and the acceptance numbers count.
accepted = Table("accepted", metadata, Column("jobs", BigInteger, nullable=False))

# Movements of credits, never changed; see credits.py.  Amounts, reservations and prices are micro-credits.
transfers = Table(
    "transfers",
    metadata,
    Column("id", SERIAL, primary_key=True, autoincrement=True),
    Column("tenant", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    # Of a job: its acceptance number (an id may come again when its job was deleted), id, and which of its moments it
    # is, see credits.py.
    Column("seq", BigInteger),
    Column("job_id", Text),
    Column("number", BigInteger),
    Column("model", Text),
    Column("server", Text),
    Column("reserved", BigInteger),  # settle: the amount that was held
    Column("slot_ms", BigInteger),  # settle: the time that is charged
    Column("price", BigInteger),  # a slot-second
    Column("why", Text),  # the reason of the job's end, or of an operator's act
    Column("actor", Text),  # the tenant of the operator's key
    Column("reference", Text),  # of an operator's act: its Idempotency-Key, after the time when the account was opened
    Column("carried", Integer, nullable=False, server_default="0"),  # 1: it stands for all older ones of its kind
    CheckConstraint(one_of_check("kind", TRANSFER_KINDS), name="kind"),
    CheckConstraint("amount >= 0", name="amount"),
    Index("ix_transfers_tenant", "tenant", "id"),
    Index(
        *("uq_transfers_act", "tenant", "reference"),
        unique=True,
        sqlite_where=_HAS_REFERENCE,
        postgresql_where=_HAS_REFERENCE,
    ),
    Index(*("uq_transfers_job", "seq", "kind", "number"), unique=True, sqlite_where=_OF_JOB, postgresql_where=_OF_JOB),
    sqlite_autoincrement=True,
)

# A tenant's balance is the sum of its rows.
balance_parts = Table(
    "balance_parts",
    metadata,
    Column("id", SERIAL, primary_key=True, autoincrement=True),
    Column("tenant", Text, nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in ("available", "held", "spent")),
    Index("ix_balance_parts_tenant", "tenant", "available"),
)

# A tenant pays for its jobs while it has an account that is not closed.
credit_accounts = Table(
    "credit_accounts",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("overdraft", BigInteger, nullable=False, server_default="0"),  # how far below 0 a reservation may lead
    Column("low_mark", BigInteger),  # the event credit.low is written when less is available
    Column("low_since_ms", BigInteger),
    Column("opened_ms", BigInteger, nullable=False),
    # What an earlier tenant of this name had: its last transfer, and what it had spent.
    Column("after_transfer", BigInteger, nullable=False, server_default="0"),
    Column("spent_before", BigInteger, nullable=False, server_default="0"),
    Column("closed_ms", BigInteger),
    CheckConstraint("overdraft >= 0", name="overdraft"),
)
