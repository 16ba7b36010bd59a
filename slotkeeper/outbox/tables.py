"""The tables of sink cursors, webhooks and delivery attempts.

The table of messages is in slotkeeper/jobs/tables.py, because the end of a job writes to it.  Times are milliseconds
since the epoch, UTC; JSON is text.
"""

from sqlalchemy import BigInteger, CheckConstraint, Column, Float, Index, Integer, Table, Text

from slotkeeper.db.schema import EMPTY_TEXT, SERIAL, metadata, one_of_check

# How far each sink has received the events; see slotkeeper/outbox/sink_cursors.py.
relays = Table(
    "relays",
    metadata,
    Column("sink", Text, primary_key=True),
    Column("position", BigInteger, nullable=False),  # The sink has all events up to this one.
    Column("holder", Text),  # the process that relays to it
    Column("until_ms", BigInteger, nullable=False, server_default="0"),  # when the hold expires
)

# Webhooks: the URLs at which tenants receive the events of their jobs.
receivers = Table(
    "receivers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False, index=True),
    Column("url", Text, nullable=False),
    Column("types", Text, nullable=False),  # JSON: a list of event types
    Column("template", Text),  # JSON; null: the standard body
    Column("description", Text, nullable=False, server_default=EMPTY_TEXT),
    Column("sealed", Text, nullable=False),  # the signing secret, encrypted
    Column("former_sealed", Text),
    Column("former_until_ms", BigInteger),
    Column("state", Text, nullable=False, server_default="enabled"),
    Column("reason", Text),
    Column("changed_by", Text),
    Column("changed_ms", BigInteger),
    Column("created_ms", BigInteger, nullable=False),
    Column("after_event", BigInteger, nullable=False),  # Only later events become messages.
    Column("behind", BigInteger),  # the last event that became messages; null: follows the common cursor
    Column("failures", Integer, nullable=False, server_default="0"),  # in a row
    Column("failing_since_ms", BigInteger),
    Column("open_until_ms", BigInteger, nullable=False, server_default="0"),
    Column("max_per_s", Float),  # messages a second; null: no limit
    Column("paced_until_us", BigInteger, nullable=False, server_default="0"),  # the next message is not sent before
    CheckConstraint(one_of_check("state", ["enabled", "disabled"]), name="state"),
)

# The delivery log: the newest attempts of each subscription.  `receiver`: as in the table of messages.
tries = Table(
    "tries",
    metadata,
    Column("id", SERIAL, primary_key=True, autoincrement=True),
    Column("receiver", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("job_id", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("number", Integer, nullable=False),  # of the attempt, among those of its message
    Column("outcome", Text, nullable=False),
    Column("status", Integer),
    Column("latency_ms", Integer, nullable=False),
    Column("error", Text),
    Column("answer", Text),  # the beginning of the response
    Column("inside", Integer, nullable=False, server_default="0"),  # 1: the response came from the operator's network
    CheckConstraint(one_of_check("outcome", ["delivered", "failed", "given_up"]), name="outcome"),
    Index("ix_tries_receiver", "receiver", "id"),
    sqlite_autoincrement=True,
)
