"""The token that a server must show when it pushes a result: made for one attempt of one job."""

import hashlib
import hmac
from functools import lru_cache
from typing import Any

from foundation.once import once
from tasks.config import TaskSettings
from tasks.keyring import callback_keys

_BLOCK = 64  # bytes, of SHA-256


def token(job_id: str, attempt: int) -> str:
    return _token(callback_keys()[0], job_id, attempt)


def is_valid(shown: str, job_id: str, attempt: int) -> bool:
    valid = (_token(key, job_id, attempt).encode() for key in callback_keys())
    return any(hmac.compare_digest(shown.encode(), one) for one in valid)


def _token(key: bytes, job_id: str, attempt: int) -> str:
    begun = _keyed(key)
    inner, outer = begun[0].copy(), begun[1].copy()
    inner.update(f"callback {job_id} {attempt}".encode())
    outer.update(inner.digest())
    return str(outer.hexdigest())


@lru_cache(maxsize=16)
def _keyed(key: bytes) -> tuple[Any, Any]:
    """HMAC-SHA256's two hashes, begun with a key no longer than their block: `hmac` takes half as long again."""
    block = key.ljust(_BLOCK, b"\0")
    return tuple(hashlib.sha256(bytes(byte ^ pad for byte in block)) for pad in (0x36, 0x5C))  # type: ignore[return-value]


def url(job_id: str) -> str:
    return f"{_base()}/tasks/callback/{job_id}"


@once
def _base() -> str:
    return TaskSettings().callback_base  # Settings take a while to read, and this is asked for every run.
