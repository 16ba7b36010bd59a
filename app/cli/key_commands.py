"""Commands for the keys of tenants, in the database without the API."""

import re
from typing import TYPE_CHECKING

import click

from app.cli.output import acting_locally, json_option, print_json, print_table, short_time
from app.cli.tenant_commands import open_tenants, print_new_key
from app.terminal import echo, escape_line

if TYPE_CHECKING:
    from slotkeeper.registry.api_keys import ApiKey, ApiKeys

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


@click.group()
def keys() -> None:
    """Manage the keys of tenants, directly in the database of this machine.

    A key may be used for what its scopes say: submit, read, manage (its dead jobs and webhooks), keys (its tenant's
    keys), audit, and operate, which is everything, for all tenants.
    """


@keys.command("list")
@click.argument("tenant")
@json_option
def list_keys(tenant: str, as_json: bool) -> None:
    """List the keys of a tenant, the newest first.

    A key that has ended is listed for 90 days.
    """
    from slotkeeper.clock import now_ms

    with acting_locally():
        found = _keys().list_of(tenant)
    now = now_ms()
    if as_json:
        print_json([_view(key, now) for key in found])
        return
    rows = [
        (key.id, key.name, _format_scopes(key), "valid" if key.is_valid(now) else "ended", *_times(key))
        for key in found
    ]
    titles = ("key", "name", "scopes", "state", "made at", "last used", "ends at")
    print_table(titles, rows, f"Tenant {escape_line(tenant)} has no keys.  Make one with: slotkeeper keys add TENANT")


@keys.command("add")
@click.argument("tenant")
@click.option("--name", default="", help="What the key is for, or where it is used.")
@click.option(
    "--scope", "scopes", multiple=True, help="What it may be used for; repeat it.  [default: submit read manage]"
)
@click.option("--expires", metavar="TIME", help="After what time it ends, such as 12h or 90d.")
@json_option
def add_key(tenant: str, name: str, scopes: tuple[str, ...], expires: str | None, as_json: bool) -> None:
    """Make a further key for a tenant and print it.

    The key cannot be read again.
    """
    from slotkeeper.clock import now_ms
    from slotkeeper.registry.identity import FIRST_SCOPES, parse_scopes

    now = now_ms()
    expires_ms = None if expires is None else now + 1000 * _parse_seconds("--expires", expires, 3650)
    with acting_locally():
        given = parse_scopes(scopes) if scopes else FIRST_SCOPES
        new = _keys().add(tenant, given, now_ms=now, name=name, expires_ms=expires_ms)
    print_new_key(tenant, new, as_json)


@keys.command("rotate")
@click.argument("tenant")
@click.argument("key")
@click.option(
    "--overlap", default="0s", metavar="TIME", help="How long the former key stays valid, such as 30min or 1h."
)
@json_option
def rotate_key(tenant: str, key: str, overlap: str, as_json: bool) -> None:
    """Replace a key by a new one with the same name and scopes, and print that.

    KEY is its id, or its name if one valid key has it.  The former key ends within a second, or after --overlap.
    """
    from slotkeeper.clock import now_ms

    overlap_ms = 1000 * _parse_seconds("--overlap", overlap, 30)
    with acting_locally():
        new = _keys().rotate(tenant, _find_id(tenant, key), overlap_ms, now_ms=now_ms())
    print_new_key(tenant, new, as_json, note=f"The former key stays valid for {overlap}.  ")


@keys.command("revoke")
@click.argument("tenant")
@click.argument("key")
def revoke_key(tenant: str, key: str) -> None:
    """Revoke a key: within a second it opens nothing any more.

    KEY is its id, or its name if one valid key has it.
    """
    from slotkeeper.clock import now_ms

    with acting_locally():
        key_id = _find_id(tenant, key)
        _keys().revoke(tenant, key_id, now_ms())
    echo(f"Key {escape_line(key_id)} is revoked.")


@keys.command("token")
@click.argument("tenant")
@click.argument("key")
@click.option("--ttl", default="1h", metavar="TIME", help="How long it is valid, such as 30min or 7d.  [default: 1h]")
@json_option
def make_token(tenant: str, key: str, ttl: str, as_json: bool) -> None:
    """Print a token for the messages of a bare Celery client.

    The client sends it in the header slotkeeper_token.  It submits jobs by Celery and opens nothing else, and it is
    valid only while KEY is: a key's id, or its name if one valid key has it.
    """
    from slotkeeper.clock import iso_time, now_ms
    from slotkeeper.registry.identity import Scope
    from tasks.security.celery_tokens import TokenSubject
    from tasks.security.celery_tokens import make_token as make

    expires_ms = now_ms() + 1000 * _parse_seconds("--ttl", ttl, 30)
    with acting_locally():
        key_id = _find_id(tenant, key)
        identity = _keys().find_by_id(tenant, key_id, now_ms())
        if identity is None:
            raise click.ClickException(f"Tenant {tenant!r} has no valid key {key!r}; `keys list` names them.")
        identity.require(Scope.SUBMIT)
        token = make(TokenSubject(tenant, key_id), expires_ms)
    if as_json:
        print_json({"token": token, "expires_at": iso_time(expires_ms)})
        return
    echo(token)
    echo(f"It is valid until {short_time(iso_time(expires_ms))}, or until key {key_id} is not.", err=True)


def _keys() -> "ApiKeys":
    """Raises ClickException: the database has another schema."""
    from slotkeeper.registry.api_keys import ApiKeys

    return ApiKeys(open_tenants().database)


def _find_id(tenant: str, key: str) -> str:
    """Return the id of a key that is named by it, or by a name that only one valid key has."""
    from slotkeeper.clock import now_ms

    now = now_ms()
    named = [known.id for known in _keys().list_of(tenant) if known.name == key and known.is_valid(now)]
    if len(named) > 1:
        raise click.UsageError(f"Tenant {tenant!r} has {len(named)} valid keys named {key!r}: give the id of one.")
    return named[0] if named else key


def _parse_seconds(option: str, duration: str, most_days: int) -> int:
    """Return the seconds of a duration such as 90s, 30min, 1h or 2d.  Raises UsageError."""
    parts = re.fullmatch("([0-9]{1,9})(s|min|h|d)", duration)
    seconds = int(parts[1]) * _SECONDS[parts[2]] if parts else None
    if seconds is None or seconds > most_days * 86_400:
        raise click.UsageError(f"{option} {duration!r} is no time of at most {most_days}d; write 90s, 30min, 1h or 2d.")
    return seconds


def _format_scopes(key: "ApiKey") -> str:
    from slotkeeper.registry.identity import format_scopes

    return format_scopes(key.scopes)


def _times(key: "ApiKey") -> tuple[str | None, ...]:
    from slotkeeper.clock import iso_time

    ends_ms = min((at for at in (key.expires_ms, key.revoked_ms) if at is not None), default=None)
    return tuple(None if at is None else short_time(iso_time(at)) for at in (key.created_ms, key.last_used_ms, ends_ms))


def _view(key: "ApiKey", at_ms: int) -> dict[str, object]:
    """Return what --json prints of a key; the API shows the same."""
    from app.schemas.tenant_schemas import KeyView

    return KeyView.build(key, valid=key.is_valid(at_ms))


COMMANDS = (keys,)
