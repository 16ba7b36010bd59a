"""Celery's retry options of `infer`, and how a run ends by them.

They apply where the model's configuration sets none.  `task_annotations = {"infer": {"max_retries": 5}}` in
celeryconfig.py changes an option, as for any task of Celery.
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

_RETRIED_KINDS = frozenset({OutcomeKind.RETRY, OutcomeKind.CANCELED})  # CANCELED: by the server, unasked


class ServerFault(Exception):
    """The server responded with an error, or with a response that cannot be read: (code, message)."""


class RetriedTask(Task):
    """A task whose retry options are the defaults of ModelConfig.  A retried job waits in the database."""

    autoretry_for = (ServerFault,)
    dont_autoretry_for = (Reject,)  # A rejected message returns to the broker, whatever `autoretry_for` names.
    retry_backoff = ModelConfig().retry_backoff
    retry_backoff_max = ModelConfig().retry_backoff_max
    retry_jitter = True
    max_retries = ModelConfig().max_retries


def retry_task() -> RetriedTask:
    """Return the task `infer`, to which Celery has applied `task_annotations`.

    Looked up by its name, because its module imports this one.
    """
    celery.loader.import_task_module("tasks.inference")
    return cast(RetriedTask, celery.tasks["infer"])


def with_task_options(config: ModelConfig) -> ModelConfig:
    """Return the configuration in which the task's retry options replace the fields that the model does not set."""
    task = retry_task()
    max_retries = sys.maxsize if task.max_retries is None else task.max_retries
    options = {
        "max_retries": max_retries if issubclass(ServerFault, tuple(task.autoretry_for)) else 0,
        "retry_backoff": float(task.retry_backoff),
        "retry_backoff_max": float(task.retry_backoff_max),
        "retry_jitter": config.retry_jitter if task.retry_jitter else 0.0,
    }
    return config.model_copy(update={name: options[name] for name in options.keys() - config.model_fields_set})


def countdown_s(failures: int, config: ModelConfig, retry_after_s: float | None = None) -> float:
    """Return the seconds to wait after the failure number `failures` (0: the first).

    config: with the task's options (`with_task_options`).  retry_after_s: the server's Retry-After, which counts if it
    is longer, up to `retry_backoff_max`.
    """
    longest_ms, requested_ms = round(config.retry_backoff_max * 1000), round((retry_after_s or 0.0) * 1000)
    factor_ms = max(round(config.retry_backoff * 1000), 1)  # 0 doubled is 0: the job would use up its retries at once.
    doubled_ms = get_exponential_backoff_interval(factor_ms, failures, longest_ms)
    wait_ms = max(doubled_ms, min(requested_ms, longest_ms))
    # Celery's full jitter of the whole wait would halve the time for which the retries bridge an outage.
    spread_ms = round(2 * config.retry_jitter * wait_ms)
    wait_ms += get_exponential_backoff_interval(spread_ms, 0, spread_ms, full_jitter=True) - spread_ms // 2
    return wait_ms / 1000


def decide_end(
    run: Run,
    outcome: Outcome | StopReason,
    config: ModelConfig,
    settings: RoutingSettings,
    *,
    canceling: bool,
    max_result_bytes: int | None = None,
) -> Decision:
    """Return the decision on how a run with this outcome ends.  `canceling`, `max_result_bytes`: as in `decide`."""
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
        max_result_bytes=max_result_bytes,
    )
