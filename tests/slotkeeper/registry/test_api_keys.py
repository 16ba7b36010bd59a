"""API keys: several for a tenant, each with its scopes, its expiry and its rotation."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import text, update

from app.cli.__main__ import main
from slotkeeper.audit import AuditFilter, find_entries
from slotkeeper.db import Database
from slotkeeper.db.schema import metadata
from slotkeeper.errors import Conflict, InvalidRequest, NotFound
from slotkeeper.registry.api_keys import ApiKeys, hash_key, is_mistyped, make_key
from slotkeeper.registry.identity import FIRST_SCOPES, LOCAL_IDENTITY, Scope, Tenant, parse_scopes
from slotkeeper.registry.tables import tenants
from slotkeeper.registry.tenant_limits import NO_RATE, RateLimit
from slotkeeper.registry.tenants import Tenants
from tasks.services import database as wired
from tests.support.builders import T0
from tests.support.keys import add_key

HOUR_MS = 3_600_000


@pytest.fixture
def keys(database: Database) -> ApiKeys:
    Tenants(database).add(Tenant("acme"), T0)
    return ApiKeys(database)


def _is_valid(keys: ApiKeys, key: str, at_ms: int = T0) -> bool:
    return hash_key(key) in keys.list_valid(at_ms)[1]


def _ids(keys: ApiKeys) -> list[str]:
    return [key.id for key in keys.list_of("acme")]


# -- what a key is -----------------------------------------------------------------------------------------------


def test_a_key_is_kept_as_its_sha_256() -> None:
    assert hash_key("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_no_two_keys_are_alike_and_each_is_hard_to_guess() -> None:
    made = [make_key() for _ in range(20)]
    assert len({new.key[15:58] for new in made}) == len({new.id for new in made}) == 20
    assert all(re.fullmatch("sk_[0-9A-Za-z]{61}", new.key) and new.key[3:15] == new.id for new in made)
    assert 62**43 > 2**256


def test_each_mistyped_character_of_a_key_is_detected() -> None:
    key = make_key().key
    assert not is_mistyped(key)
    for at in range(len(key)):
        assert is_mistyped(key[:at] + ("x" if key[at] != "x" else "y") + key[at + 1 :])


def test_a_key_of_the_previous_release_is_not_reported_as_mistyped() -> None:
    assert not is_mistyped("sk_" + 43 * "a")


def test_the_key_cannot_be_read_from_the_database(keys: ApiKeys, database: Database) -> None:
    key = add_key(database, "acme", Scope.OPERATE)
    with database.read() as connection:
        cells = [
            str(cell)
            for table in metadata.sorted_tables
            for row in connection.execute(text(f"SELECT * FROM {table.name}"))
            for cell in row
        ]
    assert hash_key(key) in cells
    assert not any(key in cell or key[15:58] in cell for cell in cells)


def test_without_keys_every_client_is_the_default_tenant_with_all_scopes() -> None:
    assert LOCAL_IDENTITY.tenant == Tenant("default") and all(LOCAL_IDENTITY.may(scope) for scope in Scope)


@pytest.mark.parametrize("words", [["submit", "fly"], ["OPERATE"], []])
def test_an_unknown_scope_is_refused_with_those_that_there_are(words: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="submit, read, manage, keys, audit, operate"):
        parse_scopes(words)


# -- making, changing, ending ------------------------------------------------------------------------------------


def test_a_tenant_has_several_keys_each_with_its_scopes(keys: ApiKeys) -> None:
    reader = keys.add("acme", {Scope.READ}, now_ms=T0 + 1, name="dashboard", by="root", expires_ms=T0 + HOUR_MS)
    listed = keys.list_of("acme")
    assert [(key.name, key.scopes, key.created_by, key.expires_ms) for key in listed] == [
        ("dashboard", {Scope.READ}, "root", T0 + HOUR_MS),
        ("first", FIRST_SCOPES, None, None),
    ]
    identity = keys.list_valid(T0)[1][hash_key(reader.key)].identity
    assert (identity.tenant, identity.key_id) == (Tenant("acme"), reader.id)
    assert identity.may(Scope.READ) and not identity.may(Scope.SUBMIT) and not identity.operates


def test_a_rotation_keeps_the_rate_limit_of_a_key(keys: ApiKeys) -> None:
    rate = RateLimit(rate_per_s=0.5, burst=2)
    former = keys.add("acme", {Scope.SUBMIT}, now_ms=T0, rate=rate)
    new = keys.rotate("acme", former.id, 0, now_ms=T0)
    assert keys.list_valid(T0)[1][hash_key(new.key)].identity.key_rate == rate
    assert keys.change("acme", new.id, {"rate": NO_RATE}, T0).rate == NO_RATE


def test_a_key_is_invalid_from_its_expiry_time(keys: ApiKeys) -> None:
    key = keys.add("acme", {Scope.READ}, now_ms=T0, expires_ms=T0 + 1000).key
    assert _is_valid(keys, key, T0 + 999) and not _is_valid(keys, key, T0 + 1000)


def test_a_revoked_key_is_not_valid_and_stays_listed(keys: ApiKeys) -> None:
    new, before = keys.add("acme", FIRST_SCOPES, now_ms=T0 + 1), keys.get_version()
    keys.revoke("acme", new.id, T0 + 2)
    assert not _is_valid(keys, new.key) and keys.get_version() == before + 1
    assert keys.get("acme", new.id).revoked_ms == T0 + 2
    keys.revoke("acme", new.id, T0 + 3)
    assert keys.get("acme", new.id).revoked_ms == T0 + 2, "it ended then"


def test_the_new_key_is_valid_after_a_rotation_and_the_former_key_until_the_overlap_ends(keys: ApiKeys) -> None:
    former = keys.add("acme", {Scope.AUDIT}, now_ms=T0, name="n", expires_ms=T0 + 9 * HOUR_MS)
    new = keys.rotate("acme", former.id, HOUR_MS, now_ms=T0)
    for at_ms, valid in ((T0 + HOUR_MS - 1, True), (T0 + HOUR_MS, False)):
        assert (_is_valid(keys, former.key, at_ms), _is_valid(keys, new.key, at_ms)) == (valid, True)
    key = keys.get("acme", new.id)
    assert (key.name, key.scopes, key.expires_ms) == ("n", {Scope.AUDIT}, T0 + 9 * HOUR_MS)


def test_a_rotation_does_not_prolong_a_key(keys: ApiKeys) -> None:
    former = keys.add("acme", {Scope.READ}, now_ms=T0, expires_ms=T0 + 1000)
    keys.rotate("acme", former.id, HOUR_MS, now_ms=T0)
    assert keys.get("acme", former.id).expires_ms == T0 + 1000
    with pytest.raises(Conflict, match="not valid any more"):
        keys.rotate("acme", former.id, HOUR_MS, now_ms=T0 + 1000)


def test_the_last_key_that_may_operate_is_kept(keys: ApiKeys) -> None:
    last = keys.add("acme", {Scope.OPERATE}, now_ms=T0)
    for act in (
        lambda: keys.revoke("acme", last.id, T0, keeps_an_operator=True),
        lambda: keys.change("acme", last.id, {"scopes": {Scope.READ}}, T0, keeps_an_operator=True),
    ):
        with pytest.raises(Conflict, match="last key that may operate"):
            act()
    assert _is_valid(keys, last.key) and keys.get("acme", last.id).scopes == {Scope.OPERATE}
    other = keys.add("acme", {Scope.OPERATE}, now_ms=T0)
    keys.revoke("acme", last.id, T0, keeps_an_operator=True)
    keys.revoke("acme", other.id, T0)  # As by the command line.
    assert not _is_valid(keys, other.key)


def test_another_tenants_key_does_not_exist(keys: ApiKeys, database: Database) -> None:
    Tenants(database).add(Tenant("zeta"), T0)
    (key_id,) = _ids(keys)
    for act in (
        lambda: keys.get("zeta", key_id),
        lambda: keys.revoke("zeta", key_id, T0),
        lambda: keys.rotate("zeta", key_id, 0, now_ms=T0),
        lambda: keys.change("zeta", key_id, {"name": "mine"}, T0),
        lambda: keys.add("nobody", FIRST_SCOPES, now_ms=T0),
    ):
        with pytest.raises(NotFound):
            act()


def test_a_key_is_listed_for_ninety_days_after_its_end(keys: ApiKeys) -> None:
    ended = keys.add("acme", {Scope.READ}, now_ms=T0)
    keys.revoke("acme", ended.id, T0)
    keys.add("acme", {Scope.READ}, now_ms=T0 + 90 * 24 * HOUR_MS)
    assert ended.id in _ids(keys)
    keys.add("acme", {Scope.READ}, now_ms=T0 + 90 * 24 * HOUR_MS + 1)
    assert ended.id not in _ids(keys)


def test_the_audit_log_lists_each_change_of_a_key_and_never_the_key(keys: ApiKeys, database: Database) -> None:
    new = keys.add("acme", {Scope.READ}, now_ms=T0)
    keys.change("acme", new.id, {"name": "other"}, T0)
    rotated = keys.rotate("acme", new.id, 0, now_ms=T0)
    keys.revoke("acme", rotated.id, T0)
    entries = find_entries(database, AuditFilter())
    assert [entry.act for entry in entries] == ["key.revoke", "key.rotate", "key.change", "key.add", "tenant.add"]
    assert not any(made.key[15:] in str(entry) for made in (new, rotated) for entry in entries)


def test_the_keys_of_a_removed_tenant_are_deleted(keys: ApiKeys, database: Database) -> None:
    Tenants(database).remove("acme")
    assert keys.list_valid(T0)[1] == {} and keys.list_of("acme") == []


def test_a_process_of_the_release_before_refuses_a_copied_key_that_was_revoked_or_rotated(
    keys: ApiKeys, database: Database
) -> None:
    """It knows a key by the tenant's columns."""
    (copied,) = _ids(keys)
    hashed = next(iter(keys.list_valid(T0)[1]))

    def known() -> list[str | None]:
        with database.read() as connection:
            return list(connection.execute(text("SELECT key_hash, former_hash FROM tenants")).one())

    def copy() -> None:
        database.write(lambda tx: tx.connection.execute(update(tenants).values(key_hash=hashed, former_hash=hashed)))

    assert known() == [f"-{copied}", None], "a new tenant has no key there"
    copy()
    keys.rotate("acme", copied, HOUR_MS, now_ms=T0)
    assert known() == [f"-{copied}", None]
    copy()
    keys.revoke("acme", copied, T0)
    assert known() == [f"-{copied}", None]


# -- commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiKeys]:
    """An installation whose commands work on the database in a folder."""
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path))
    monkeypatch.delenv("SLOTKEEPER_DATABASE_URL", raising=False)
    wired.cache_clear()
    assert CliRunner().invoke(main, ["migrate"]).exit_code == 0
    yield ApiKeys(wired())
    wired().close()
    wired.cache_clear()


def _run(*words: str) -> Result:
    return CliRunner().invoke(main, [*words])


def test_commands_make_list_rotate_and_revoke_keys(home: ApiKeys) -> None:
    first = _run("tenants", "add", "acme").stdout.strip()
    reader = _run("keys", "add", "acme", "--scope", "read", "--name", "board", "--expires", "90d").stdout.strip()
    assert "board" in _run("keys", "list", "acme").stdout
    new = _run("keys", "rotate", "acme", first[3:15], "--overlap", "1h").stdout.strip()
    assert _run("keys", "revoke", "acme", reader[3:15]).exit_code == 0
    now = home.get("acme", new[3:15]).created_ms
    assert [_is_valid(home, key, now) for key in (first, reader, new)] == [True, False, True]
    for wrong in ("1", "1w", "31d", "-1h", ""):
        assert _run("keys", "rotate", "acme", first[3:15], "--overlap", wrong).exit_code == 2
    assert _run("keys", "revoke", "acme", "first").exit_code == 2, "two are valid and have this name"
    assert _run("keys", "revoke", "acme", first[3:15]).exit_code == 0
    assert _run("keys", "revoke", "acme", "first").exit_code == 0 and not _is_valid(home, new, now)
    refused = _run("keys", "add", "acme", "--scope", "fly")
    assert refused.exit_code == 1 and "there are submit, read" in refused.output
