"""Keys are apart: what one purpose, tenant or rotation is given says nothing about another."""

import base64
import hmac
import stat
from itertools import combinations
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from slotkeeper.jobs.notifications import SECRET_OVERLAP_MS
from slotkeeper.registry.tenants import SecretRotation
from tasks import server_push
from tasks.security import keyring
from tasks.security.keyring import Purpose, derive, webhook_secrets

SECRET, OTHER = (base64.b64encode(bytes(range(n, n + 32))).decode() for n in (1, 2))
NOW = 1_800_000_000_000
JOB = "01920000-0000-7000-8000-000000000000"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path))
    _set(monkeypatch)
    return tmp_path


def _set(monkeypatch: pytest.MonkeyPatch, secret: str = "", former: str = "") -> None:
    monkeypatch.setenv("SLOTKEEPER_SECRET", secret)
    monkeypatch.setenv("SLOTKEEPER_FORMER_SECRET", former)
    keyring.installation_secrets.cache_clear()


@pytest.mark.parametrize("weak", ["A" * 36, "password" * 4, base64.b64encode(b"slotkeeper" * 3).decode()])
def test_a_secret_that_repeats_itself_is_refused_and_not_quoted(weak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, weak)
    with pytest.raises(ValueError, match="SLOTKEEPER_SECRET repeats itself") as refused:
        keyring.installation_secrets()
    assert weak not in str(refused.value)


def test_a_key_is_that_of_hkdf() -> None:
    known = HKDF(algorithm=SHA256(), length=32, salt=b"slotkeeper keys 1", info=b'["webhook","acme","0"]')
    assert derive(b"s" * 32, Purpose.WEBHOOK, "acme", "0") == known.derive(b"s" * 32)


def test_no_two_purposes_tenants_or_rotations_share_a_key() -> None:
    contexts = [(), ("",), ("a",), ("a", "0"), ("a", "1"), ("a0",), ("a", "", "0"), ('a","0',)]
    keys = {(p, c): derive(b"s" * 32, p, *c) for p in Purpose for c in contexts}
    assert all(keys[one] != keys[other] for one, other in combinations(keys, 2))


def test_who_can_verify_webhooks_can_make_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with the webhook secret nor in the ways in which tokens were made of a shared one before."""
    _set(monkeypatch, SECRET)
    given = webhook_secrets("acme", SecretRotation(), NOW)[0]
    bare = given.removeprefix("whsec_")
    for key in (given.encode(), bare.encode(), base64.b64decode(bare), SECRET.encode()):
        assert not server_push.is_valid_token(server_push._token(key, JOB, 1), JOB, 1)
    assert server_push.is_valid_token(server_push.push_token(JOB, 1), JOB, 1)


@pytest.mark.parametrize("size", [24, 32, 64])
def test_a_token_is_hmac_sha256(size: int) -> None:
    key = bytes(range(size))
    assert server_push._token(key, JOB, 3) == hmac.new(key, f"callback {JOB} 3".encode(), "sha256").hexdigest()


def test_each_tenant_has_a_webhook_secret_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SECRET)
    assert webhook_secrets("acme", SecretRotation(), NOW) != webhook_secrets("other", SecretRotation(), NOW)
    assert SECRET not in webhook_secrets("acme", SecretRotation(), NOW)[0]


def test_a_rotated_secret_overlaps_with_the_one_before_for_a_day_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SECRET)
    (before,) = webhook_secrets("acme", SecretRotation(), NOW)
    rotated = SecretRotation(1, NOW)
    after, former = webhook_secrets("acme", rotated, NOW + SECRET_OVERLAP_MS - 1)
    assert former == before != after
    assert webhook_secrets("acme", rotated, NOW + SECRET_OVERLAP_MS) == [after]


def test_the_first_secret_has_none_before_it() -> None:
    assert SecretRotation().list_valid(0) == (0,)


def test_what_a_former_secret_signed_is_valid_while_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SECRET)
    token, (hook,) = server_push.push_token(JOB, 1), webhook_secrets("acme", SecretRotation(), NOW)
    _set(monkeypatch, OTHER, former=SECRET)
    assert server_push.is_valid_token(token, JOB, 1)
    assert server_push.push_token(JOB, 1) != token
    assert webhook_secrets("acme", SecretRotation(), NOW)[1:] == [hook]
    _set(monkeypatch, OTHER)
    assert not server_push.is_valid_token(token, JOB, 1)
    assert hook not in webhook_secrets("acme", SecretRotation(), NOW)


@pytest.mark.parametrize("secret", ["short", "c2hvcnQ=", "no base64 at all, but long enough to be some", "ä" * 60])
@pytest.mark.parametrize("setting", ["secret", "former"])
def test_a_secret_that_is_none_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, setting: str, secret: str
) -> None:
    _set(monkeypatch, **{"secret": SECRET, setting: secret})
    with pytest.raises(ValueError, match=r"SLOTKEEPER_(FORMER_)?SECRET must be .*openssl rand") as refused:
        keyring.installation_secrets()
    assert secret not in str(refused.value)


def test_a_secret_is_the_same_however_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for written in (SECRET, SECRET.rstrip("="), f"whsec_{SECRET}", f" {SECRET}\n"):
        _set(monkeypatch, written)
        found.add(keyring.fingerprints()[0])
    assert len(found) == 1


def test_a_secret_of_ones_own_home_is_made_once_and_for_its_owner_only(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = keyring.installation_secrets()
    _set(monkeypatch)
    assert keyring.installation_secrets() == first
    assert stat.S_IMODE((home / "secret").stat().st_mode) == 0o600
    assert sorted(path.name for path in home.iterdir()) == ["secret"]


def test_a_fingerprint_tells_nothing_that_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SECRET)
    (told,) = keyring.fingerprints()
    assert len(told) == 16
    assert told not in server_push.push_token(JOB, 1) and told not in SECRET
