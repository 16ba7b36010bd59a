"""What only few jobs have, such as a retry policy, as JSON in one column that is null for the others."""

from functools import lru_cache

import orjson
from pydantic import BaseModel, ConfigDict, Field

MAX_JITTER = 0.25
MIN_GONE_S, MAX_GONE_S = 5, 3600
"""Seconds of `cancel_when_gone`."""
MAX_OUTPUT = 10_000_000
"""The largest expected output."""


class OnFailure(BaseModel):
    """How a job is retried, in place of its model's configuration.  Times are seconds; None: as its model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_retries: int | None = Field(None, ge=0, description="Error responses of servers before the job is dead.")
    backoff: float | None = Field(None, gt=0, description="Seconds before the first retry; doubled each time.")
    backoff_max: float | None = Field(None, gt=0, description="Longest wait before a retry, in seconds.")
    jitter: float | None = Field(
        None, ge=0, le=MAX_JITTER, description="Share of a wait by which it varies, up or down."
    )
    max_crashes: int | None = Field(None, ge=1, description="Crashes of a worker or server before the job is dead.")
    max_time: float | None = Field(None, gt=0, description="Seconds that one run may take.")


class JobTerms(BaseModel):
    """The terms of a job.  expected_output: a size of the result, in the model's own unit, such as tokens."""

    model_config = ConfigDict(frozen=True)  # Fields of a later release are left out.

    on_failure: OnFailure | None = None
    expected_output: int | None = None
    cancel_when_gone: float | None = None  # seconds for which no client has to wait for it
    custom_id: str | None = None  # the client's own name of a line of a batch

    def encode(self) -> str | None:
        """Return the terms as they are stored; None: there are none."""
        given = self.model_dump(exclude_none=True)
        return orjson.dumps(given, option=orjson.OPT_SORT_KEYS).decode() if given else None


NO_TERMS = JobTerms()


@lru_cache(maxsize=1024)
def decode_terms(text: str | None) -> JobTerms:
    """Return stored terms."""
    return NO_TERMS if text is None else JobTerms(**orjson.loads(text))
