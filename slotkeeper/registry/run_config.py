"""The configuration under which a job runs: its model's, with the job's own terms."""

from typing import Any

from pydantic import ValidationError

from slotkeeper.errors import InvalidJob
from slotkeeper.jobs.terms import OnFailure, decode_terms
from slotkeeper.registry.model_config import ModelConfig

_FIELDS = {
    "max_retries": "max_retries",
    "backoff": "retry_backoff",
    "backoff_max": "retry_backoff_max",
    "jitter": "retry_jitter",
    "max_crashes": "max_crashes",
    "max_time": "max_poll_time",
}
"""Field of `on_failure` -> field of the model's configuration."""


def read_on_failure(given: Any, model: str, config: ModelConfig) -> OnFailure:
    """Return how a job is retried.  Raises InvalidJob: it is no such policy, or more than its model allows."""
    try:
        on_failure = OnFailure.model_validate(given, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(["on_failure", *(str(part) for part in first["loc"])])
        raise InvalidJob(field, f"{field}: {first['msg']}") from None
    for name, asked in on_failure:
        allowed = getattr(config, _FIELDS[name])
        if asked is not None and name != "jitter" and asked > allowed:
            raise InvalidJob(
                f"on_failure.{name}", f"on_failure.{name} is {asked:g}; model {model!r} allows {allowed:g}"
            )
    return on_failure


def apply_terms(config: ModelConfig, terms: str | None) -> ModelConfig:
    """Return the configuration for a job with these terms.  What its model allows by now is the most.

    terms: as they are stored; None: it has none.
    """
    on_failure = None if terms is None else decode_terms(terms).on_failure
    if on_failure is None:
        return config
    asked = {_FIELDS[name]: value for name, value in on_failure if value is not None}
    own = {
        name: value if name == "retry_jitter" else min(value, getattr(config, name)) for name, value in asked.items()
    }
    longest = own.get("retry_backoff_max", config.retry_backoff_max)
    own["retry_backoff"] = min(own.get("retry_backoff", config.retry_backoff), longest)
    own["poll_interval"] = min(config.poll_interval, own.get("max_poll_time", config.poll_interval))
    return config.model_copy(update=own)
