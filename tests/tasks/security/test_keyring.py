"""Derived keys are independent: the key of one purpose, tenant or rotation reveals nothing about another."""

import base64
import hmac
import stat
from itertools import combinations
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from slotkeeper.jobs.notifications import SECRET_OVERLAP_MS
from slotkeeper.registry.webhook_rotations import SecretRotation
from tasks import server_push
from tasks.security import keyring
from tasks.security.keyring import Purpose, derive, webhook_secrets

SECRET, OTHER = (base64.b64encode(bytes(range(n, n + 32))).decode() for n in (1, 2))
NOW_MS = 1_800_000_000_000
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
    with pytest.raises(ValueError, match="SLOTKEEPER_SECRET repeats itself") as caught:
        keyring.installation_secrets()
    assert weak not in str(caught.value)


def test_a_derived_key_is_an_hkdf_sha256_key() -> None:
    hkdf = HKDF(algorithm=SHA256(), length=32, salt=b"slotkeeper keys 1", info=b'["webhook","acme","0"]')
    assert derive(b"s" * 32, Purpose.WEBHOOK, "acme", "0") == hkdf.derive(b"s" * 32)


def test_no_two_purposes_tenants_or_rotations_share_a_key() -> None:
    contexts = [(), ("",), ("a",), ("a", "0"), ("a", "1"), ("a0",), ("a", "", "0"), ('a","0',)]
    keys = {(p, c): derive(b"s" * 32, p, *c) for p in Purpose for c in contexts}
    assert all(keys[one] != keys[other] for one, other in combinations(keys, 2))


def test_no_valid_token_can_be_made_with_a_webhook_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the webhook secret, in any encoding, nor the text of the installation's secret is a key of tokens."""
    _set(monkeypatch, SECRET)
    webhook_secret = webhook_secrets("acme", SecretRotation(), NOW_MS)[0]
    encoded = webhook_secret.removeprefix("whsec_")
    for key in (webhook_secret.encode(), encoded.encode(), base64.b64decode(encoded), SECRET.encode()):
        assert not server_push.is_valid_token(server_push._token(key, JOB, 1), JOB, 1)
    assert server_push.is_valid_token(server_push.push_token(JOB, 1), JOB, 1)


@pytest.mark.parametrize("size", [24, 32, 64])
def test_a_token_is_hmac_sha256(size: int) -> None:
    key = bytes(range(size))
    assert server_push._token(key, JOB, 3) == hmac.new(key, f"callback {JOB} 3".encode(), "sha256").hexdigest()


def test_each_tenant_has_a_different_webhook_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SECRET)
    assert webhook_secrets("acme", SecretRotation(), NOW_MS) != webhook_secrets("other", SecretRotation(), NOW_MS)
    assert SECRET not in webhook_secrets("acme", SecretRotation(), NOW_MS)[0]


def test_a_rotated_secret_overlaps_with_the_one_before_for_a_day_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SECRET)
    (before,) = webhook_secrets("acme", SecretRotation(), NOW_MS)
    rotated = SecretRotation(1, NOW_MS)
    after, former = webhook_secrets("acme", rotated, NOW_MS + SECRET_OVERLAP_MS - 1)
    assert former == before != after
    assert webhook_secrets("acme", rotated, NOW_MS + SECRET_OVERLAP_MS) == [after]


def test_a_secret_that_was_never_rotated_has_no_former_secret() -> None:
    assert SecretRotation().list_valid(0) == (0,)


def test_a_former_secret_is_valid_while_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SECRET)
    token, (webhook_secret,) = server_push.push_token(JOB, 1), webhook_secrets("acme", SecretRotation(), NOW_MS)
    _set(monkeypatch, OTHER, former=SECRET)
    assert server_push.is_valid_token(token, JOB, 1)
    assert server_push.push_token(JOB, 1) != token
    assert webhook_secrets("acme", SecretRotation(), NOW_MS)[1:] == [webhook_secret]
    _set(monkeypatch, OTHER)
    assert not server_push.is_valid_token(token, JOB, 1)
    assert webhook_secret not in webhook_secrets("acme", SecretRotation(), NOW_MS)


@pytest.mark.parametrize(
    "secret",
    ["short", "c2hvcnQ=", "long enough for a secret, but with spaces and commas, which are not base64", "ä" * 60],
)
@pytest.mark.parametrize("setting", ["secret", "former"])
def test_an_invalid_secret_is_refused_and_not_quoted(
    monkeypatch: pytest.MonkeyPatch, setting: str, secret: str
) -> None:
    _set(monkeypatch, **{"secret": SECRET, setting: secret})
    with pytest.raises(ValueError, match=r"SLOTKEEPER_(FORMER_)?SECRET must be .*openssl rand") as caught:
        keyring.installation_secrets()
    assert secret not in str(caught.value)


def test_padding_prefix_and_whitespace_do_not_change_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints = set()
    for text in (SECRET, SECRET.rstrip("="), f"whsec_{SECRET}", f" {SECRET}\n"):
        _set(monkeypatch, text)
        fingerprints.add(keyring.fingerprints()[0])
    assert len(fingerprints) == 1


def test_a_secret_in_the_home_directory_is_created_once_and_readable_only_by_its_owner(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = keyring.installation_secrets()
    _set(monkeypatch)
    assert keyring.installation_secrets() == first
    assert stat.S_IMODE((home / "secret").stat().st_mode) == 0o600
    assert sorted(path.name for path in home.iterdir()) == ["secret"]


def test_a_fingerprint_reveals_no_part_of_a_secret_or_token(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SECRET)
    (fingerprint,) = keyring.fingerprints()
    assert len(fingerprint) == 16
    assert fingerprint not in server_push.push_token(JOB, 1) and fingerprint not in SECRET
