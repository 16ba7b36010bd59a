"""The installation's secret, and the keys derived from it: one for each purpose, so that none opens another's door.

    secret --HKDF-SHA256--> callback tokens
                            webhooks, for each tenant and each rotation of its secret
                            secrets by name, sealed in the record
                            the fingerprint by which processes see whether they have the same secret

Who is given a webhook secret, to verify with, can therefore make no token and no other tenant's webhook, and can
go back to nothing.  A former secret (SLOTKEEPER_FORMER_SECRET) still verifies and signs, until it is unset.
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
from slotkeeper.registry.tenants import SecretRotation
from slotkeeper.state_folder import read_or_create
from tasks.config import TaskSettings

_MIN_SECRET_BYTES, _MIN_DIFFERENT_BYTES = 24, 12  # of random bytes, hardly ever fewer are different
_KEY_BYTES = 32  # of a derived key: one block of HKDF-SHA256
_SALT = b"slotkeeper keys 1"


class Purpose(StrEnum):
    """What a key is for.  A new purpose is a new row here; nothing is signed with the secret itself."""

    CALLBACK = "callback"
    WEBHOOK = "webhook"
    FINGERPRINT = "fingerprint"
    SEALING = "sealing"
    SESSION = "session"


@lru_cache(maxsize=1024)
def derive(secret: bytes, purpose: Purpose, *context: str) -> bytes:
    """The key of 32 bytes for this purpose and context (RFC 5869; `info` is the JSON list of both)."""
    info = orjson.dumps([purpose, *context])
    extracted = hmac.digest(_SALT, secret, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)


def callback_keys() -> tuple[bytes, ...]:
    """Those under which a callback token is valid; new ones are made with the first."""
    return _callback_keys(installation_secrets())


@lru_cache(maxsize=16)
def _callback_keys(secrets: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(derive(secret, Purpose.CALLBACK) for secret in secrets)


def sealing_keys() -> Iterator[bytes]:
    """Those under which secrets in the record may be sealed; new ones are with the first."""
    return (derive(secret, Purpose.SEALING) for secret in installation_secrets())


def session_keys() -> Iterator[bytes]:
    """Those under which a visit to the page is valid; new ones are signed with the first."""
    return (derive(secret, Purpose.SESSION) for secret in installation_secrets())


def webhook_secrets(tenant: str, rotation: SecretRotation, now_ms: int) -> list[str]:
    """With which a tenant's messages are signed at `now_ms`, the newest first, as Standard Webhooks writes them."""
    return [
        _encode_secret(derive(secret, Purpose.WEBHOOK, tenant, str(number)))
        for secret in installation_secrets()
        for number in rotation.list_valid(now_ms)
    ]


def fingerprints() -> list[str]:
    """Tells secrets apart without telling anything of them; that of the present one first."""
    return [derive(secret, Purpose.FINGERPRINT).hex()[:16] for secret in installation_secrets()]


@singleton
def installation_secrets() -> tuple[bytes, ...]:
    """The present secret, from the settings or else from `home`, and the former one if it is still told.

    Raises ValueError for one that is none.
    """
    settings = TaskSettings()
    present = settings.secret or read_or_create(StorageSettings().home / "secret", _new_secret)
    former = [decode_secret(settings.former_secret, "SLOTKEEPER_FORMER_SECRET")] if settings.former_secret else []
    return (decode_secret(present, "SLOTKEEPER_SECRET"), *former)


def decode_secret(text: str, name: str) -> bytes:
    """The secret's bytes.  Raises ValueError, which names the setting and not the secret."""
    try:
        bare = text.strip().removeprefix("whsec_")
        secret = base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
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


def _new_secret() -> str:
    return base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()
