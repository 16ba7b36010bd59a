"""The installation's secret, and the keys derived from it, a different one for each purpose.

    secret --HKDF-SHA256--> key of callback tokens
                            webhook secrets, for each tenant and each rotation
                            key that encrypts named secrets in the database
                            key that signs session cookies
                            key that signs the tokens of Celery's messages
                            key with which workers authenticate at gateways
                            fingerprint: processes compare it to detect different secrets

So a receiver that verifies with its webhook secret cannot make a callback token or sign for another tenant, and cannot
compute the installation's secret.  A former secret (SLOTKEEPER_FORMER_SECRET) verifies and signs until it is unset.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache

import orjson

from slotkeeper.config import StorageSettings
from slotkeeper.process import singleton
from slotkeeper.registry.webhook_rotations import SecretRotation
from slotkeeper.state_folder import read_or_create
from tasks.config import TaskSettings

_MIN_SECRET_BYTES, _MIN_DIFFERENT_BYTES = 24, 12  # 24 random bytes almost never have fewer than 12 distinct values.
_KEY_BYTES = 32  # of a derived key: one block of HKDF-SHA256
_SALT = b"slotkeeper keys 1"


class Purpose(StrEnum):
    """The purpose of a derived key.  The installation's secret itself signs and encrypts nothing."""

    CALLBACK = "callback"
    WEBHOOK = "webhook"
    FINGERPRINT = "fingerprint"
    SEALING = "sealing"
    SESSION = "session"
    CELERY = "celery"
    GATEWAY = "gateway"


@lru_cache(maxsize=1024)
def derive(secret: bytes, purpose: Purpose, *context: str) -> bytes:
    """Return the key of 32 bytes for a purpose and a context (RFC 5869; `info` is the JSON list of both)."""
    info = orjson.dumps([purpose, *context])
    extracted = hmac.digest(_SALT, secret, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)


def callback_keys() -> tuple[bytes, ...]:
    """Return the keys that verify callback tokens; the first one signs new tokens."""
    return _callback_keys(installation_secrets())


@lru_cache(maxsize=16)
def _callback_keys(secrets: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(derive(secret, Purpose.CALLBACK) for secret in secrets)


def sealing_keys() -> Iterator[bytes]:
    """Return the keys that decrypt secrets in the database; the first one encrypts new secrets."""
    return (derive(secret, Purpose.SEALING) for secret in installation_secrets())


def session_keys() -> Iterator[bytes]:
    """Return the keys that verify session cookies; the first one signs new cookies."""
    return (derive(secret, Purpose.SESSION) for secret in installation_secrets())


def celery_keys() -> Iterator[bytes]:
    """Return the keys that verify the tokens of Celery's messages; the first one signs new tokens."""
    return (derive(secret, Purpose.CELERY) for secret in installation_secrets())


def gateway_keys() -> tuple[str, ...]:
    """Return the keys with which workers authenticate at gateways; the first one is sent."""
    return tuple(derive(secret, Purpose.GATEWAY).hex() for secret in installation_secrets())


def webhook_secrets(tenant: str, rotation: SecretRotation, now_ms: int) -> list[str]:
    """Return the secrets that sign a tenant's messages at `now_ms`, newest first, as Standard Webhooks formats them."""
    return [
        _encode_secret(derive(secret, Purpose.WEBHOOK, tenant, str(number)))
        for secret in installation_secrets()
        for number in rotation.list_valid(now_ms)
    ]


def fingerprints() -> list[str]:
    """Return a hash of each installation secret that reveals nothing of it, the current secret first."""
    return [derive(secret, Purpose.FINGERPRINT).hex()[:16] for secret in installation_secrets()]


@singleton
def installation_secrets() -> tuple[bytes, ...]:
    """Return the current secret, from the settings or else from `home`, and the former one if it is set.

    Raises ValueError for a secret that is not valid.
    """
    settings = TaskSettings()
    current = settings.secret or read_or_create(StorageSettings().home / "secret", _make_secret)
    former = [decode_secret(settings.former_secret, "SLOTKEEPER_FORMER_SECRET")] if settings.former_secret else []
    return (decode_secret(current, "SLOTKEEPER_SECRET"), *former)


def decode_secret(text: str, name: str) -> bytes:
    """Return the bytes of a secret.  Raises ValueError, which names the setting and does not quote the secret."""
    try:
        encoded = text.strip().removeprefix("whsec_")
        secret = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        secret = b""
    if len(secret) < _MIN_SECRET_BYTES:
        raise ValueError(
            f"{name} must be the base64 of at least {_MIN_SECRET_BYTES} bytes; one is made by: openssl rand -base64 32"
        )
    if len(set(secret)) < _MIN_DIFFERENT_BYTES:
        raise ValueError(f"{name} repeats itself, and could be guessed; one is made by: openssl rand -base64 32")
    return secret


def _encode_secret(key: bytes) -> str:
    return f"whsec_{base64.b64encode(key).decode()}"


def _make_secret() -> str:
    return base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()
