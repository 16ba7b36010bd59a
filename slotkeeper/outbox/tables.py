"""The tables of sinks and webhooks; the table of messages is in slotkeeper/jobs/tables.py, since ends write them.

Times are milliseconds since the epoch, UTC; JSON is text.
"""

from sqlalchemy import BigInteger, CheckConstraint, Column, Float, Index, Integer, Table, Text, text

from slotkeeper.db.schema import metadata, one_of_check

_EMPTY = text("''")  # Said so, because Alembic takes a plain "" for no default.
_SERIAL = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts on by itself only for a plain INTEGER key.

# How far each sink of events has come; see slotkeeper/outbox/sink_cursors.py.
relays = Table(
    "relays",
    metadata,
    Column("sink", Text, primary_key=True),
    Column("position", BigInteger, nullable=False),  # All events up to this one are with it.
    Column("holder", Text),  # who relays to it
    Column("until_ms", BigInteger, nullable=False, server_default="0"),  # until when that is believed
)

# Addresses of tenants that are told what happens to their jobs.
receivers = Table(
    "receivers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False, index=True),
    Column("url", Text, nullable=False),
    Column("types", Text, nullable=False),  # JSON: of events
    Column("template", Text),  # JSON; null: the body is ours
    Column("description", Text, nullable=False, server_default=_EMPTY),
    Column("sealed", Text, nullable=False),  # its signing secret
    Column("former_sealed", Text),
    Column("former_until_ms", BigInteger),
    Column("state", Text, nullable=False, server_default="enabled"),
    Column("reason", Text),
    Column("changed_by", Text),
    Column("changed_ms", BigInteger),
    Column("created_ms", BigInteger, nullable=False),
    Column("after_event", BigInteger, nullable=False),  # what was before it is not told
    Column("behind", BigInteger),  # the event up to which it is told; null: it is told with the others
    Column("failures", Integer, nullable=False, server_default="0"),  # in a row
    Column("failing_since_ms", BigInteger),
    Column("open_until_ms", BigInteger, nullable=False, server_default="0"),
    Column("max_per_s", Float),  # messages that it is sent in a second; null: as many as there are
    Column("paced_until_us", BigInteger, nullable=False, server_default="0"),  # the next is sent then or later
    CheckConstraint(one_of_check("state", ["enabled", "disabled"]), name="state"),
)

# The last tries of each subscription's messages.  `receiver`: as in the table of messages.
tries = Table(
    "tries",
    metadata,
    Column("id", _SERIAL, primary_key=True, autoincrement=True),
    Column("receiver", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("job_id", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("number", Integer, nullable=False),  # of the message's tries
    Column("outcome", Text, nullable=False),
    Column("status", Integer),
    Column("latency_ms", Integer, nullable=False),
    Column("error", Text),
    Column("answer", Text),  # its first bytes
    Column("inside", Integer, nullable=False, server_default="0"),  # the answer came from a network of the operator's
    CheckConstraint(one_of_check("outcome", ["delivered", "failed", "given_up"]), name="outcome"),
    Index("ix_tries_receiver", "receiver", "id"),
    sqlite_autoincrement=True,
)
