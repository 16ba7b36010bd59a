"""The token that a server must show when it pushes a result: made for one attempt of one job."""

import hmac
from functools import lru_cache

from slotkeeper.process import singleton
from tasks.config import TaskSettings
from tasks.security.keyring import callback_keys


def push_token(job_id: str, attempt: int) -> str:
    return _token(callback_keys()[0], job_id, attempt)


def is_valid_token(token: str, job_id: str, attempt: int) -> bool:
    valid = (_token(key, job_id, attempt).encode() for key in callback_keys())
    return any(hmac.compare_digest(token.encode(), expected) for expected in valid)


def _token(key: bytes, job_id: str, attempt: int) -> str:
    signature = _keyed_hmac(key).copy()  # `hmac.digest` lets go of the interpreter, which the loop then waits for.
    signature.update(f"callback {job_id} {attempt}".encode())
    return signature.hexdigest()


@lru_cache(8)
def _keyed_hmac(key: bytes) -> hmac.HMAC:
    return hmac.new(key, digestmod="sha256")


def push_url(job_id: str) -> str:
    return f"{_callback_base_url()}/tasks/callback/{job_id}"


@singleton
def _callback_base_url() -> str:
    return TaskSettings().callback_base  # Settings take a while to read, and this is asked for every run.
