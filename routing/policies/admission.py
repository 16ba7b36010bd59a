"""Whether a model's queue takes more jobs."""

from jobs.config import ModelConfig

_RETRY_AFTER_S = 1.0


def refusal(model: str, waiting: int, more: int, config: ModelConfig) -> tuple[str, float] | None:
    """(sentence, seconds after which to try again) if `more` jobs do not fit beside `waiting`; else None."""
    if config.max_waiting is None or waiting + more <= config.max_waiting:
        return None
    return (
        f"{waiting} jobs of model {model!r} wait, and it is configured to hold {config.max_waiting}; "
        "try again later, or raise max_waiting at /admin/model-configs.",
        _RETRY_AFTER_S,
    )
