"""Encrypt secrets for the database, and decrypt them for requests of the models that may use them.

A secret is sealed with AES-256-GCM under a key that is derived from the installation's secret.  The name is
authenticated with the value, so a row of the database cannot be copied over another one.  The cipher is imported when
it is first used, because it costs 6 MiB in each process and many installations have no secrets.
"""

import base64
import re
import secrets
from functools import lru_cache

import structlog

from slotkeeper.errors import InvalidRequest
from tasks.security.keyring import sealing_keys

log = structlog.get_logger(__name__)

NAME_PATTERN = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
VALUE_PATTERN = r"[ -~]+"  # the characters that an HTTP header may contain
# In characters.  A shorter secret would be redacted wherever a text happens to contain the same letters.
MIN_LENGTH, MAX_LENGTH = 8, 4096
_NONCE_BYTES, _SIGNING_SECRET_BYTES = 12, 32  # bytes


def seal(name: str, value: str) -> str:
    """Return a named secret encrypted for the database.  Raises InvalidRequest if name or value is not valid."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise InvalidRequest("name", "name is a word of letters, digits and _, of at most 64, such as HF_TOKEN")
    if not MIN_LENGTH <= len(value) <= MAX_LENGTH or not re.fullmatch(VALUE_PATTERN, value):
        raise InvalidRequest("value", f"value has {MIN_LENGTH} to {MAX_LENGTH} characters, all of printable ASCII")
    return _seal(name, value)


def new_signing_secret(receiver_id: str) -> tuple[str, str]:
    """Return a new signing secret for a webhook, in the format of Standard Webhooks, and the same secret encrypted."""
    secret = f"whsec_{base64.b64encode(secrets.token_bytes(_SIGNING_SECRET_BYTES)).decode()}"
    return secret, _seal(_receiver_seal_name(receiver_id), secret)


def signing_secret(receiver_id: str, sealed: str) -> str | None:
    """Decrypt the signing secret of a webhook.  Returns None if another installation's secret encrypted it."""
    return unseal(_receiver_seal_name(receiver_id), sealed)


def reseal(name: str, sealed: str) -> str | None:
    """Return a secret sealed under the present secret of the installation; None: it is, or it cannot be opened."""
    value = unseal(name, sealed)
    if value is None or _open_with(next(sealing_keys()), name, sealed) is not None:
        return None
    return _seal(name, value)


def reseal_signing_secret(receiver_id: str, sealed: str) -> str | None:
    """Return what `reseal` returns, for the signing secret of a webhook."""
    return reseal(_receiver_seal_name(receiver_id), sealed)


def _receiver_seal_name(receiver_id: str) -> str:
    return f"webhook {receiver_id}"  # NAME_PATTERN allows no space, so no named secret has this name.


def _seal(name: str, value: str) -> str:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(_NONCE_BYTES)
    ciphertext = AESGCM(next(sealing_keys())).encrypt(nonce, value.encode(), name.encode())
    return base64.b64encode(nonce + ciphertext).decode()


@lru_cache(maxsize=1024)
def unseal(name: str, sealed: str) -> str | None:
    """Decrypt a named secret.  Returns None if another installation's secret encrypted it."""
    return next((value for key in sealing_keys() if (value := _open_with(key, name, sealed)) is not None), None)


def _open_with(key: bytes, name: str, sealed: str) -> str | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    ciphertext = base64.b64decode(sealed)
    try:
        return AESGCM(key).decrypt(ciphertext[:_NONCE_BYTES], ciphertext[_NONCE_BYTES:], name.encode()).decode()
    except InvalidTag:
        return None
