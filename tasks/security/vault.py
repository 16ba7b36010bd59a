"""Secrets by name: sealed for the record, opened for the requests of those models that may name them.

AES-256-GCM under a key of the installation's secret; the name is authenticated with the value, so that one row of the
record cannot be put in another's place.  The cipher is loaded by the first secret: it takes every process 6 MiB, and
many an installation has none.
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
VALUE_PATTERN = r"[ -~]+"  # what a header can carry
_NO_LIMIT = 1_000_000
MIN_LENGTH, MAX_LENGTH = (
    8,
    4096,
)  # characters; a shorter one would be taken for itself wherever a text repeats its letters
_NONCE_BYTES, _SIGNING_SECRET_BYTES = 12, 32  # bytes


def seal(name: str, value: str) -> str:
    """The secret as the record keeps it.  Raises InvalidRequest for what cannot be one."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise InvalidRequest("name", "name is a word of letters, digits and _, of at most 64, such as HF_TOKEN")
    if not MIN_LENGTH <= len(value) <= MAX_LENGTH or not re.fullmatch(VALUE_PATTERN, value):
        raise InvalidRequest("value", f"value has {MIN_LENGTH} to {MAX_LENGTH} characters, all of printable ASCII")
    return _seal(name, value)


def new_signing_secret(receiver_id: str) -> tuple[str, str]:
    """A secret with which a receiver's messages are signed, as Standard Webhooks writes it; and as it is kept."""
    secret = f"whsec_{base64.b64encode(secrets.token_bytes(_SIGNING_SECRET_BYTES)).decode()}"
    return secret, _seal(_receiver_seal_name(receiver_id), secret)


def signing_secret(receiver_id: str, sealed: str) -> str | None:
    """None: it was sealed under another installation's secret."""
    return unseal(_receiver_seal_name(receiver_id), sealed)


def _receiver_seal_name(receiver_id: str) -> str:
    return f"webhook {receiver_id}"  # With a blank: no secret that descriptions name is called so.


def _seal(name: str, value: str) -> str:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(_NONCE_BYTES)
    ciphertext = AESGCM(next(sealing_keys())).encrypt(nonce, value.encode(), name.encode())
    return base64.b64encode(nonce + ciphertext).decode()


@lru_cache(maxsize=1024)
def unseal(name: str, sealed: str) -> str | None:
    """The secret; None: it was sealed under another installation's secret."""
    return next((value for key in sealing_keys() if (value := _open_with(key, name, sealed)) is not None), None)


def _open_with(key: bytes, name: str, sealed: str) -> str | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    ciphertext = base64.b64decode(sealed)
    try:
        return AESGCM(key).decrypt(ciphertext[:_NONCE_BYTES], ciphertext[_NONCE_BYTES:], name.encode()).decode()
    except InvalidTag:
        return None
