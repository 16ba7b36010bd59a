"""When to try again after a wrong answer: 1, 2, 4 … 30 s, ±10 %."""

from registry.config import ModelConfig

_JITTER = 0.1


def delay_ms(failures: int, config: ModelConfig, chance: float, retry_after_s: float | None = None) -> int:
    """Milliseconds to wait after the failure number `failures` (0: the first).

    `chance` in [0, 1) spreads the waits by ±10 %, lest all failed jobs come back at once.
    `retry_after_s`: the server's own Retry-After; honoured where it is longer, up to the model's longest wait.
    """
    doubled = config.retry_backoff * 2.0 ** min(failures, 60)
    wanted = max(doubled, retry_after_s or 0.0)
    return round(min(wanted, config.retry_backoff_max) * (1 - _JITTER + 2 * _JITTER * chance) * 1000)
