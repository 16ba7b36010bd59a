"""Secrets by name: sealed for the record, opened for the requests of those models that may name them.

AES-256-GCM under a key of the installation's secret; the name is authenticated with the value, so that one row of the
record cannot be put in another's place.
"""

import base64
import re
import secrets
from functools import lru_cache

import structlog
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from jobs.errors import InvalidJob
from jobs.secrets import Secret
from tasks.keyring import sealing_keys
from tasks.wiring import catalog, dispatcher

log = structlog.get_logger(__name__)

NAME = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
SIGNS = r"[ -~]+"  # what a header can carry
SHORTEST, LONGEST = 8, 4096  # characters; a shorter one would be taken for itself wherever a text repeats its letters
_NONCE = 12  # bytes


def seal(name: str, value: str) -> str:
    """The secret as the record keeps it.  Raises InvalidJob for what cannot be one."""
    if not re.fullmatch(NAME, name):
        raise InvalidJob("name", "name is a word of letters, digits and _, of at most 64, such as HF_TOKEN")
    if not SHORTEST <= len(value) <= LONGEST or not re.fullmatch(SIGNS, value):
        raise InvalidJob("value", f"value has {SHORTEST} to {LONGEST} characters, all of printable ASCII")
    nonce = secrets.token_bytes(_NONCE)
    sealed = AESGCM(next(sealing_keys())).encrypt(nonce, value.encode(), name.encode())
    return base64.b64encode(nonce + sealed).decode()


@lru_cache(maxsize=1024)
def opened(name: str, sealed: str) -> str | None:
    """The secret; None: it was sealed under another installation's secret."""
    return next((value for key in sealing_keys() if (value := _opened_by(key, name, sealed)) is not None), None)


def _opened_by(key: bytes, name: str, sealed: str) -> str | None:
    box = base64.b64decode(sealed)
    try:
        return AESGCM(key).decrypt(box[:_NONCE], box[_NONCE:], name.encode()).decode()
    except InvalidTag:
        return None


def seal_anew() -> int:
    """Bring secrets that a former installation's secret has sealed under the present one; answers how many."""
    changed = 0
    for it in dispatcher().fleet.snapshot().secrets.values():
        value = opened(it.name, it.sealed)
        if value is not None and _opened_by(next(sealing_keys()), it.name, it.sealed) is None:
            changed += catalog().replace_seal(it, seal(it.name, value))
    if changed:
        log.info("secrets_sealed_anew", secrets=changed)
    return changed


def value_for(model: str, name: str) -> str | None:
    """The secret as it is set now, for requests of this model; None: there is none that it may use."""
    found: Secret | None = dispatcher().fleet.known().secrets.get(name)
    return opened(name, found.sealed) if found is not None and found.is_for(model) else None
