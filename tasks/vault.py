"""Secrets by name: sealed for the record, opened for the requests of those models that may name them.

AES-256-GCM under a key of the installation's secret; the name is authenticated with the value, so that one row of the
record cannot be put in another's place.
"""

import base64
import re
import secrets
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from jobs.errors import InvalidJob
from jobs.secrets import Secret
from tasks.keyring import sealing_keys
from tasks.wiring import dispatcher

NAME = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
SHORTEST, LONGEST = 8, 4096  # characters; a shorter one would be taken for itself wherever a text repeats its letters
_NONCE = 12  # bytes


def seal(name: str, value: str) -> str:
    """The secret as the record keeps it.  Raises InvalidJob for what cannot be one."""
    if not re.fullmatch(NAME, name):
        raise InvalidJob("name", "name is a word of letters, digits and _, of at most 64, such as HF_TOKEN")
    if not SHORTEST <= len(value) <= LONGEST or not value.isprintable():
        raise InvalidJob("value", f"value has {SHORTEST} to {LONGEST} characters, none of them a line break or control")
    nonce = secrets.token_bytes(_NONCE)
    sealed = AESGCM(next(sealing_keys())).encrypt(nonce, value.encode(), name.encode())
    return base64.b64encode(nonce + sealed).decode()


@lru_cache(maxsize=1024)
def opened(name: str, sealed: str) -> str | None:
    """The secret; None: it was sealed under another installation's secret."""
    box = base64.b64decode(sealed)
    for key in sealing_keys():
        try:
            return AESGCM(key).decrypt(box[:_NONCE], box[_NONCE:], name.encode()).decode()
        except InvalidTag:
            continue
    return None


def value_for(model: str, name: str) -> str | None:
    """The secret as it is set now, for requests of this model; None: there is none that it may use."""
    found: Secret | None = dispatcher().fleet.known().secrets.get(name)
    return opened(name, found.sealed) if found is not None and found.is_for(model) else None
