"""What order and placement need: constraints of jobs, attributes of servers, and who takes part.

Revision: 0002, after: 0001

On PostgreSQL every default is a constant, so that no table is rewritten; `jobs` comes last, so that its lock is
held for a moment only.  The release before goes on beside it: what is new has a default.
"""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_STANDING_BEFORE = "state IN ('online', 'draining', 'paused')"
_STANDING = "state IN ('online', 'paused', 'draining', 'frozen')"
_WEIGHT = "weight > 0 AND weight <= 1000"
_BOUND = "SELECT count(*) FROM jobs WHERE constraints <> '' AND state IN ('queued', 'delayed', 'running')"
# Overrides that the release before would stumble over.
_NEW_OVERRIDES = frozenset(
    {
        "affinity",
        "breaker_failures",
        "capacity",
        "capacity_per_slot",
        "tenant_slot_limits",
        "tenant_slots",
        "tier_head_start",
        "unmatched",
        "weights",
    }
)
_NEW_POLICIES = frozenset({"aging", "fair"})


def _state() -> sa.Column[Any]:
    return sa.Column("state", sa.Text, server_default="online", nullable=False)


def _who() -> list[sa.Column[Any]]:
    return [sa.Column("reason", sa.Text), sa.Column("changed_by", sa.Text), sa.Column("changed_ms", sa.BigInteger)]


def _declared() -> list[sa.Column[Any]]:
    return [
        sa.Column("attributes", sa.Text, server_default="{}", nullable=False),
        sa.Column("weight", sa.Float, server_default="1", nullable=False),
    ]


# SQLite copies a table whose checks change, and does not tell Alembic which checks it had: so they are told here.


def _servers(state: sa.Column[Any], *more: Any) -> sa.Table:
    return sa.Table(
        "servers",
        sa.MetaData(),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("fleet", sa.Text, nullable=False),
        sa.Column("slots", sa.Integer, nullable=False),
        state,
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.CheckConstraint("slots > 0", name=op.f("ck_servers_slots")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_servers")),
        *more,
    )


def _models(*more: Any) -> sa.Table:
    return sa.Table(
        "models",
        sa.MetaData(),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("fleet", sa.Text, nullable=False),
        sa.Column("overrides", sa.Text, server_default="{}", nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_models")),
        *more,
    )


def upgrade() -> None:
    op.create_table(
        "tenant_states",
        sa.Column("name", sa.Text, nullable=False),
        _state(),
        *_who(),
        sa.CheckConstraint(_STANDING, name=op.f("ck_tenant_states_state")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_tenant_states")),
    )
    with op.batch_alter_table("models", copy_from=_models()) as batch:
        for column in (_state(), *_who()):
            batch.add_column(column)
        batch.create_check_constraint(op.f("ck_models_state"), _STANDING)
    before = sa.CheckConstraint(_STANDING_BEFORE, name=op.f("ck_servers_state"))
    with op.batch_alter_table(
        "servers", copy_from=_servers(sa.Column("state", sa.Text, nullable=False), before)
    ) as batch:
        batch.drop_constraint(op.f("ck_servers_state"), type_="check")
        batch.alter_column("state", existing_type=sa.Text, existing_nullable=False, server_default="online")
        for column in (*_declared(), *_who()):
            batch.add_column(column)
        batch.create_check_constraint(op.f("ck_servers_state"), _STANDING)
        batch.create_check_constraint(op.f("ck_servers_weight"), _WEIGHT)
    op.add_column("jobs", sa.Column("constraints", sa.Text, server_default=sa.text("''"), nullable=False))


def downgrade() -> None:
    """Forgets attributes and weights, and who is paused but servers; a frozen server is paused afterwards.

    Raises RuntimeError while there are unfinished jobs with constraints.
    """
    connection = op.get_bind()
    if connection.execute(sa.text(_BOUND)).scalar():
        raise RuntimeError(
            "There are unfinished jobs with constraints, which the release before would run on any server. "
            "Let them end or cancel them first."
        )
    _forget_new_overrides(connection)
    connection.execute(sa.text("UPDATE servers SET state = 'paused' WHERE state = 'frozen'"))
    now = (
        sa.CheckConstraint(_STANDING, name=op.f("ck_servers_state")),
        sa.CheckConstraint(_WEIGHT, name=op.f("ck_servers_weight")),
    )
    with op.batch_alter_table("servers", copy_from=_servers(_state(), *_declared(), *_who(), *now)) as batch:
        batch.drop_constraint(op.f("ck_servers_weight"), type_="check")
        batch.drop_constraint(op.f("ck_servers_state"), type_="check")
        batch.alter_column("state", existing_type=sa.Text, existing_nullable=False, server_default=None)
        for column in (*_declared(), *_who()):
            batch.drop_column(column.name)
        batch.create_check_constraint(op.f("ck_servers_state"), _STANDING_BEFORE)
    check = sa.CheckConstraint(_STANDING, name=op.f("ck_models_state"))
    with op.batch_alter_table("models", copy_from=_models(_state(), *_who(), check)) as batch:
        batch.drop_constraint(op.f("ck_models_state"), type_="check")
        for column in (_state(), *_who()):
            batch.drop_column(column.name)
    op.drop_table("tenant_states")
    op.drop_column("jobs", "constraints")


def _forget_new_overrides(connection: sa.Connection) -> None:
    for name, text in connection.execute(sa.text("SELECT name, overrides FROM models")).all():
        kept = {
            key: value
            for key, value in json.loads(text).items()
            if key not in _NEW_OVERRIDES and not (key == "policy" and value in _NEW_POLICIES)
        }
        changed = {"name": name, "kept": json.dumps(kept)}
        connection.execute(sa.text("UPDATE models SET overrides = :kept WHERE name = :name"), changed)
