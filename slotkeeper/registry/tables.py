"""The tables of models, servers, tenants, descriptions and secrets.  Times in ms since the epoch, UTC; JSON is text."""

from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Column, Float, ForeignKey, Index, Integer, Table, Text

from slotkeeper.db.schema import EMPTY_TEXT, metadata, one_of_check
from slotkeeper.registry.values import AdminState


def _admin_state() -> tuple[Column[Any] | CheckConstraint, ...]:
    """Return the columns of the state that an operator sets: since when, by whom and why."""
    return (
        Column("state", Text, nullable=False, server_default=AdminState.ONLINE.value),
        Column("reason", Text),
        Column("changed_by", Text),
        Column("changed_ms", BigInteger),
        CheckConstraint(one_of_check("state", [s.value for s in AdminState]), name="state"),
    )


models = Table(
    "models",
    metadata,
    Column("name", Text, primary_key=True),
    Column("fleet", Text, nullable=False),
    Column("overrides", Text, nullable=False, server_default="{}"),
    Column("created_ms", BigInteger, nullable=False),
    *_admin_state(),
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
    *_admin_state(),
    Column("leaving_ms", BigInteger),  # since when it takes no new runs, because it is being removed
    Column("leaving_by", Text),
    CheckConstraint("slots > 0", name="slots"),
    CheckConstraint("weight > 0 AND weight <= 1000", name="weight"),
)

# What each version of the catalog changed; see slotkeeper/registry/catalog_changes.py.
catalog_changes = Table(
    "catalog_changes",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("part", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("mark", Text, nullable=False),  # random
)

# Defaults of model configurations; see slotkeeper/registry/defaults.py.
defaults = Table(
    "defaults",
    metadata,
    Column("name", Text, primary_key=True),  # of the kind of models; empty: of the installation
    Column("overrides", Text, nullable=False, server_default="{}"),
    Column("changed_by", Text),
    Column("changed_ms", BigInteger, nullable=False),
)

# Sessions of the page that a log-out has ended; see slotkeeper/registry/sessions.py.
revoked_sessions = Table(
    "revoked_sessions",
    metadata,
    Column("id", Text, primary_key=True),
    Column("until_ms", BigInteger, nullable=False),  # expiry of the session
)

endpoints = Table(
    "endpoints",
    metadata,
    Column("server", Text, ForeignKey("servers.name", ondelete="CASCADE"), primary_key=True),
    Column("model", Text, ForeignKey("models.name"), primary_key=True),
    Column("url", Text, nullable=False),
    Column("overrides", Text, nullable=False, server_default="{}"),  # JSON: how it is called, if not as the model
)

# How servers are called; see slotkeeper/registry/server_descriptions.py.  Only `idle_ms` of a row changes.
descriptions = Table(
    "descriptions",
    metadata,
    Column("version", Text, primary_key=True),  # hash of the body
    Column("body", Text, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("idle_ms", BigInteger),  # since when nothing names it
)

# Sealed secrets that descriptions name; see slotkeeper/registry/server_descriptions.py.
secrets = Table(
    "secrets",
    metadata,
    Column("name", Text, primary_key=True),
    Column("models", Text),  # JSON list: models whose descriptions may name it; null: all
    Column("sealed", Text, nullable=False),
    Column("set_by", Text),
    Column("set_ms", BigInteger, nullable=False),
)

# Columns from key_hash to burst, and former_hash, are for processes of the release before; what they say is in api_keys
# and in `limits`, too.  The migration of the next release drops them.
tenants = Table(
    "tenants",
    metadata,
    Column("name", Text, primary_key=True),
    Column("key_hash", Text, nullable=False, unique=True),
    Column("admin", Integer, nullable=False, server_default="0"),
    Column("rights", Text, nullable=False, server_default=EMPTY_TEXT),  # words separated by blanks
    Column("rate_per_s", Integer),
    Column("burst", Integer),
    Column("limits", Text, nullable=False, server_default="{}"),  # JSON, see tenant_limits.py
    Column("created_ms", BigInteger, nullable=False),
    Column("former_hash", Text, index=True),  # of the key before the last rotation
    Column("former_until_ms", BigInteger),  # until when that key is valid, too
)

# See slotkeeper/registry/api_keys.py.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False, index=True),
    Column("hash", Text, nullable=False, unique=True),
    Column("scopes", Text, nullable=False),  # words separated by blanks
    Column("name", Text, nullable=False, server_default=EMPTY_TEXT),
    Column("limits", Text, nullable=False, server_default="{}"),  # JSON, see tenant_limits.py: RateLimit
    Column("created_ms", BigInteger, nullable=False),
    Column("created_by", Text),
    Column("expires_ms", BigInteger),
    Column("revoked_ms", BigInteger),
    Column("last_used_ms", BigInteger),
)

# Tenants that are not online, also such without a key.
tenant_states = Table("tenant_states", metadata, Column("name", Text, primary_key=True), *_admin_state())

# What tenants have used, by UTC day (days since 1970-01-01) and model; see usage.py.
usage_days = Table(
    "usage_days",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("day", Integer, primary_key=True, autoincrement=False),
    Column("model", Text, primary_key=True),
    *(Column(name, BigInteger, nullable=False) for name in ("slot_ms", "runs", "accepted", "completed", "ended")),
)

# What a second of a slot costs; the first row that fits applies.  Replaced as a whole, see prices.py.
prices = Table(
    "prices",
    metadata,
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("model", Text),  # null: any
    Column("condition", Text, nullable=False, server_default=EMPTY_TEXT),  # on its server, in routing's canonical text
    Column("per_slot_s", BigInteger, nullable=False),  # micro-credits
    Column("reserve_s", Integer, nullable=False, server_default="60"),  # held for a job when it is accepted
    CheckConstraint("per_slot_s >= 0", name="per_slot_s"),
    CheckConstraint("reserve_s > 0", name="reserve_s"),
)

# Jobs with known answers, which are submitted again and again; see validations.py.
validations = Table(
    "validations",
    metadata,
    Column("name", Text, primary_key=True),
    *(Column(name, Text, nullable=False) for name in ("model", "payload", "expected")),  # JSON, but for the model
    Column("compare", Text, nullable=False, server_default="subset"),
    Column("tolerance", Float, nullable=False, server_default="0"),
    Column("every_s", Integer, nullable=False),
    Column("enabled", Integer, nullable=False, server_default="1"),
    Column("next_ms", BigInteger, nullable=False, server_default="0"),  # when its next job is submitted
    Column("changed_by", Text),
    Column("changed_ms", BigInteger, nullable=False),
    CheckConstraint(one_of_check("compare", ["equal", "subset", "close"]), name="compare"),
    CheckConstraint("every_s > 0", name="every_s"),
)

# Machines whose agents connect to a gateway; see nodes.py.
nodes = Table(
    "nodes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False, unique=True),  # also of its server
    Column("owner", Text, nullable=False),  # a tenant
    Column("granted", Text, nullable=False),  # JSON, see nodes.py: Grant
    Column("token", Text, nullable=False, index=True),  # hash of the token with which it enrolled
    Column("declaration", Text),  # JSON as it was sent; null: it has not connected yet
    Column("digest", Text),  # of the declaration
    Column("fault", Text),  # why it does not serve what it declares
    Column("created_ms", BigInteger, nullable=False),
    Column("seen_ms", BigInteger),  # when it connected last, an hour late at most
    Column("revoked_ms", BigInteger),
)

# Their public keys.  Several of a node are valid while it replaces one.
node_keys = Table(
    "node_keys",
    metadata,
    Column("id", Text, primary_key=True),  # see slotkeeper/signatures.py: key_id
    Column("node", Text, ForeignKey("nodes.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("public_key", Text, nullable=False),  # base64
    Column("from_ms", BigInteger, nullable=False),
    Column("retired_ms", BigInteger),  # since when it opens no connection, and signs no results
    Column("revoked_ms", BigInteger),
)

# With which nodes enrol.
enrolment_tokens = Table(
    "enrolment_tokens",
    metadata,
    Column("hash", Text, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("granted", Text, nullable=False),
    Column("made_by", Text),
    Column("created_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
    Column("uses_left", Integer, nullable=False),
)

# One row for each of their jobs.
validation_answers = Table(
    "validation_answers",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("validation", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("server", Text),  # on which it ended
    Column("outcome", Text, nullable=False, server_default="awaited"),
    Column("at_ms", BigInteger, nullable=False),  # when it was submitted, and then when it was judged
    Column("detail", Text),  # where a wrong answer differs, or the code of the error
    CheckConstraint(one_of_check("outcome", ["awaited", "right", "wrong", "none"]), name="outcome"),
    Index("ix_validation_answers_server", "server", "at_ms"),
    Index("ix_validation_answers_outcome", "outcome", "at_ms"),
)
