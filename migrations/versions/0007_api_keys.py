"""Several keys for a tenant, each with what it may be used for.

The key that each tenant has becomes its first one, and a former key within its overlap its second.  The columns of the
release before stay, and its processes go on with them; a later migration drops tenants.key_hash, admin, rights,
former_hash and former_until_ms.

Revision: 0007, after: 0006
"""

import hashlib
import string
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None
drops = ("api_keys",)  # by its downgrade: all keys but one of each tenant

_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("hash", sa.Text, nullable=False),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False, server_default=sa.text("''")),
        sa.Column("limits", sa.Text, nullable=False, server_default="{}"),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("created_by", sa.Text),
        sa.Column("expires_ms", sa.BigInteger),
        sa.Column("revoked_ms", sa.BigInteger),
        sa.Column("last_used_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("hash", name=op.f("uq_api_keys_hash")),
    )
    op.create_index("ix_api_keys_tenant", "api_keys", ["tenant"])
    rows = op.get_bind().execute(sa.text("SELECT * FROM tenants")).mappings().all()
    copied = [_copy(row, row["key_hash"], "first") for row in rows]
    copied += [
        _copy(row, row["former_hash"], "former", row["former_until_ms"])
        for row in rows
        if row["former_hash"] is not None
    ]
    table = sa.table("api_keys", *(sa.column(name) for name in _COLUMNS))
    if copied:
        op.bulk_insert(table, copied)


_COLUMNS = ("id", "tenant", "hash", "scopes", "name", "created_ms", "expires_ms")


def _copy(row: Any, hashed: str, name: str, expires_ms: int | None = None) -> dict[str, Any]:
    scopes = ["operate"] if row["admin"] else ["submit", "read", "manage"]
    if "audit" in row["rights"].split():
        scopes.append("audit")
    values = _make_id(hashed), row["name"], hashed, " ".join(scopes), name, row["created_ms"], expires_ms
    return dict(zip(_COLUMNS, values, strict=True))


def _make_id(hashed: str) -> str:
    """Return the id of a key that has none."""
    rest, digits = int(hashlib.sha256(hashed.encode()).hexdigest(), 16), ""
    for _ in range(12):
        rest, digit = divmod(rest, len(_DIGITS))
        digits += _DIGITS[digit]
    return digits


def downgrade() -> None:
    """A tenant that was added since then keeps its oldest key that has not ended."""
    connection = op.get_bind()
    valid = sa.text("SELECT * FROM api_keys WHERE revoked_ms IS NULL AND expires_ms IS NULL ORDER BY created_ms DESC")
    keep = sa.text(
        "UPDATE tenants SET key_hash = :hash, admin = :admin, rights = :rights "
        "WHERE name = :tenant AND substr(key_hash, 1, 1) = '-'"
    )
    oldest = {row["tenant"]: row for row in connection.execute(valid).mappings()}
    for tenant, row in oldest.items():
        scopes = row["scopes"].split()
        rights = {"admin": int("operate" in scopes), "rights": "audit" if "audit" in scopes else ""}
        connection.execute(keep, {"tenant": tenant, "hash": row["hash"], **rights})
    op.drop_table("api_keys")
