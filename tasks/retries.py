"""When a run that went wrong is tried again: by Celery's retry options of `infer`, where its model sets none.

`task_annotations = {"infer": {"max_retries": 5}}` in celeryconfig.py changes one, as for any task of Celery.
"""

import sys
from typing import cast

from celery import Task
from celery.exceptions import Reject
from celery.utils.time import get_exponential_backoff_interval

from routing.config import RoutingSettings
from routing.dispatch.decision import Decision, decide
from routing.dispatch.outcome import Outcome, OutcomeKind, StopReason
from slotkeeper.clock import now_ms
from slotkeeper.jobs.values import Run
from slotkeeper.registry.model_config import ModelConfig
from tasks.celery_app import celery
from tasks.server_adapters import keeps_results

_JITTER_DIVISOR = 5  # A wait is spread over a fifth of it: ±10 %.
_RETRIED_KINDS = frozenset({OutcomeKind.RETRY, OutcomeKind.CANCELED})


class ServerFault(Exception):
    """The server answered with an error or with nonsense: (code, message)."""


class RetriedTask(Task):
    """Has the defaults of ModelConfig as Celery's retry options; a job that is tried again waits in the database."""

    autoretry_for = (ServerFault,)
    dont_autoretry_for = (Reject,)  # A message that could not be taken goes back to the broker, whatever is retried.
    retry_backoff = ModelConfig().retry_backoff
    retry_backoff_max = ModelConfig().retry_backoff_max
    retry_jitter = True
    max_retries = ModelConfig().max_retries


def retry_task() -> RetriedTask:
    """Return the task `infer`, with what `task_annotations` says of it.

    By its name: what settles runs is loaded by it.
    """
    celery.loader.import_task_module("tasks.inference")
    return cast(RetriedTask, celery.tasks["infer"])


def with_task_options(config: ModelConfig) -> ModelConfig:
    """Return the configuration with the task's retry options in place of what the model does not set."""
    task = retry_task()
    max_retries = sys.maxsize if task.max_retries is None else task.max_retries
    options = {
        "max_retries": max_retries if issubclass(ServerFault, tuple(task.autoretry_for)) else 0,
        "retry_backoff": float(task.retry_backoff),
        "retry_backoff_max": float(task.retry_backoff_max),
    }
    return config.model_copy(update={name: options[name] for name in options.keys() - config.model_fields_set})


def countdown_s(failures: int, config: ModelConfig, retry_after_s: float | None = None) -> float:
    """Return the seconds to wait after the failure number `failures` (0: the first).

    `retry_jitter` spreads them by ±10 %.  `retry_after_s` is the server's own Retry-After, which is heeded where it is
    longer, up to the model's longest wait.
    """
    config = with_task_options(config)
    longest_ms, requested_ms = round(config.retry_backoff_max * 1000), round((retry_after_s or 0.0) * 1000)
    factor_ms = max(round(config.retry_backoff * 1000), 1)  # 0 doubled stays 0: the job would burn its retries at once.
    doubled_ms = get_exponential_backoff_interval(factor_ms, failures, longest_ms)
    wait_ms = max(doubled_ms, min(requested_ms, longest_ms))
    if retry_task().retry_jitter:
        # Celery's full jitter of the whole wait would halve the time for which a job outlives a broken server.
        spread_ms = wait_ms // _JITTER_DIVISOR
        wait_ms += get_exponential_backoff_interval(spread_ms, 0, spread_ms, full_jitter=True) - spread_ms // 2
    return wait_ms / 1000


def decide_end(
    run: Run, outcome: Outcome | StopReason, config: ModelConfig, settings: RoutingSettings, *, canceling: bool
) -> Decision:
    """Return how a run ends now that came to `outcome`.  `canceling`: as in `decide`."""
    delay_ms = 0
    if isinstance(outcome, Outcome) and outcome.kind in _RETRIED_KINDS:
        config = with_task_options(config)
        delay_ms = round(countdown_s(run.failures, config, outcome.retry_after_s) * 1000)
    return decide(
        run,
        outcome,
        config,
        settings,
        now_ms(),
        canceling=canceling,
        server_keeps_result=keeps_results(run.described_by),
        retry_delay_ms=delay_ms,
    )
