"""The token that a server must show when it pushes a result: made for one attempt of one job."""

import hashlib
import hmac

from jobs.once import once
from tasks.config import TaskSettings, signing_secret


def token(job_id: str, attempt: int) -> str:
    text = f"callback {job_id} {attempt}".encode()
    return hmac.new(signing_secret().encode(), text, hashlib.sha256).hexdigest()


def is_valid(shown: str, job_id: str, attempt: int) -> bool:
    return hmac.compare_digest(shown.encode(), token(job_id, attempt).encode())


def url(job_id: str) -> str:
    return f"{_base()}/tasks/callback/{job_id}"


@once
def _base() -> str:
    return TaskSettings().callback_base  # Settings take a while to read, and this is asked for every run.
