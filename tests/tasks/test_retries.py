"""When a failed run is retried: by each of Celery's retry options of `infer`, or by the model's configuration."""

import random
from typing import Any

import pytest
from celery.exceptions import Reject
from celery.utils.time import get_exponential_backoff_interval

from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.maintenance.deadlines import promote_due_jobs
from slotkeeper.jobs.states import Reason, State
from slotkeeper.registry.model_config import ModelConfig
from tasks import retries
from tasks.inference import infer
from tasks.retries import ServerFault, countdown_s, with_task_options
from tests.support.ends import decided, end_in_order
from tests.support.harness import Harness

CONFIG = ModelConfig()
FAULT = Outcome(OutcomeKind.RETRY, code="server_error", message="no")


@pytest.fixture
def without_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the jitter of the waits."""
    monkeypatch.setattr(infer, "retry_jitter", False)


def _wait_s(harness: Harness, **config: Any) -> float:
    """Return the seconds that a job waits after its first run has failed."""
    harness.register(**config)
    job_id = harness.submit()
    active = harness.start()
    ended = end_in_order(harness.dispatcher, active, decided(harness.dispatcher, active, FAULT))
    assert ended.moved is not None and ended.moved.to is State.DELAYED
    due_ms = harness.job(job_id).due_ms
    assert due_ms is not None
    return (due_ms - harness.now) / 1000


# -- the options ---------------------------------------------------------------------------------------------------


def _end_reason(harness: Harness) -> Reason:
    """Return the reason with which a failed first run ends."""
    harness.register()
    harness.submit()
    return decided(harness.dispatcher, harness.start(), FAULT).reason


@pytest.mark.parametrize(
    ("exceptions", "reason"), [((ServerFault,), Reason.SERVER_ERROR), ((OSError,), Reason.RETRIES_EXHAUSTED)]
)
def test_autoretry_for_decides_whether_a_failed_run_is_retried(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, exceptions: tuple[type[Exception], ...], reason: Reason
) -> None:
    assert infer.autoretry_for == (ServerFault,)
    monkeypatch.setattr(infer, "autoretry_for", exceptions)
    assert _end_reason(harness) is reason


@pytest.mark.parametrize(
    ("max_retries", "reason"), [(0, Reason.RETRIES_EXHAUSTED), (1, Reason.SERVER_ERROR), (None, Reason.SERVER_ERROR)]
)
def test_max_retries_bounds_the_number_of_retries(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, max_retries: int | None, reason: Reason
) -> None:
    assert infer.max_retries == 50
    monkeypatch.setattr(infer, "max_retries", max_retries)
    assert _end_reason(harness) is reason


@pytest.mark.parametrize(("factor", "wait_s"), [(1.0, 1.0), (7, 7.0), (0.25, 0.25), (True, 1.0)])
def test_retry_backoff_is_the_first_wait(
    harness: Harness, without_jitter: None, monkeypatch: pytest.MonkeyPatch, factor: float, wait_s: float
) -> None:
    assert infer.retry_backoff == 1.0
    monkeypatch.setattr(infer, "retry_backoff", factor)
    assert _wait_s(harness) == wait_s


def test_retry_backoff_max_bounds_a_wait(
    harness: Harness, without_jitter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert infer.retry_backoff_max == 30.0
    monkeypatch.setattr(infer, "retry_backoff", 7)
    monkeypatch.setattr(infer, "retry_backoff_max", 3)
    assert _wait_s(harness) == 3.0


def test_retry_jitter_decides_whether_the_waits_are_spread(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    assert infer.retry_jitter is True
    waits = {countdown_s(0, with_task_options(CONFIG)) for _ in range(100)}
    assert len(waits) > 10 and min(waits) >= 0.9 and max(waits) <= 1.1
    monkeypatch.setattr(infer, "retry_jitter", False)
    assert {countdown_s(0, with_task_options(CONFIG)) for _ in range(100)} == {1.0} and _wait_s(harness) == 1.0


def test_the_retry_options_of_the_model_override_those_of_the_task(
    harness: Harness, without_jitter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("retry_backoff", "retry_backoff_max", "max_retries"):
        monkeypatch.setattr(infer, name, 0)
    assert _wait_s(harness, retry_backoff=2, retry_backoff_max=9, max_retries=1) == 2.0


@pytest.mark.parametrize("factor", [0, 0.0004, False, -1])
def test_without_a_backoff_the_waits_still_grow(
    harness: Harness, without_jitter: None, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """Otherwise a server that fails at once would use up all retries of a job at once."""
    monkeypatch.setattr(infer, "retry_backoff", factor)
    config = with_task_options(CONFIG)
    assert [countdown_s(failures, config) for failures in (0, 10)] == [0.001, 1.024]


def test_a_rejected_message_returns_to_the_broker_whatever_autoretry_for_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from celery import Celery

    app = Celery("rejecting", set_as_current=False)
    app.conf.task_annotations = {"rejecting": {"autoretry_for": (Exception,)}}

    def rejecting() -> None:
        raise Reject("the database is away", requeue=True)

    task = app.task(rejecting, name="rejecting", base=retries.RetriedTask)
    app.finalize()
    retried: list[Any] = []
    monkeypatch.setattr(app.tasks["rejecting"], "retry", lambda **options: retried.append(options) or ValueError())
    with pytest.raises(Reject):
        task.run()
    assert retried == []


def test_task_annotations_change_the_retry_options() -> None:
    from celery import Celery

    app = Celery("annotated", set_as_current=False)
    app.conf.task_annotations = {"annotated": {"max_retries": 5}}

    def annotated() -> None: ...

    task = app.task(annotated, name="annotated", base=retries.RetriedTask)
    app.finalize()
    assert app.tasks["annotated"].max_retries == 5 and task.retry_backoff == 1.0


# -- the length of a wait ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "seconds"), [(0, 1), (1, 2), (2, 4), (3, 8), (4, 16), (5, 30), (6, 30), (49, 30), (5000, 30)]
)
def test_waits_are_1_2_4_8_16_30_seconds_within_ten_per_cent(
    monkeypatch: pytest.MonkeyPatch, failures: int, seconds: int
) -> None:
    for randrange, wait_s in ((lambda stop: 0, 0.9 * seconds), (lambda stop: stop - 1, 1.1 * seconds)):
        with monkeypatch.context() as patched:
            patched.setattr(random, "randrange", randrange)
            assert countdown_s(failures, with_task_options(CONFIG)) == pytest.approx(wait_s)


def test_celery_computes_the_waits(without_jitter: None) -> None:
    computed = [get_exponential_backoff_interval(1, n, 30) for n in range(50)]
    assert [countdown_s(n, with_task_options(CONFIG)) for n in range(50)] == computed
    assert sum(computed) == 1381


@pytest.mark.parametrize(("retry_after_s", "wait_s"), [(None, 2.0), (0.5, 2.0), (7.0, 7.0), (3600.0, 30.0), (0.0, 2.0)])
def test_a_servers_retry_after_counts_if_it_is_longer_up_to_the_longest_wait(
    without_jitter: None, retry_after_s: float | None, wait_s: float
) -> None:
    assert countdown_s(1, with_task_options(CONFIG), retry_after_s) == wait_s


# -- responses that cannot be read ---------------------------------------------------------------------------------


def _bad_answer(message: str) -> Outcome:
    return Outcome(OutcomeKind.RETRY, code="bad_answer", message=message)


def _second_reason(harness: Harness, first: Outcome, second: Outcome) -> Reason:
    """Return the reason with which the second run of a job ends."""
    harness.register()
    harness.submit()
    active = harness.start()
    end_in_order(harness.dispatcher, active, decided(harness.dispatcher, active, first))
    harness.later(60_000)
    promote_due_jobs(harness.dispatcher)
    decision = decided(harness.dispatcher, harness.start(), second)
    assert ("twice" in decision.error.message) is (decision.reason is Reason.RETRIES_EXHAUSTED)
    return decision.reason


@pytest.mark.parametrize("character", [7, 1234])
def test_a_second_equal_unreadable_response_makes_a_job_dead(harness: Harness, character: int) -> None:
    first, second = _bad_answer("NaN at character 7"), _bad_answer(f"NaN at character {character}")
    assert _second_reason(harness, first, second) is Reason.RETRIES_EXHAUSTED


@pytest.mark.parametrize("first", [_bad_answer("an HTML page"), FAULT, Outcome(OutcomeKind.RETRY, code="bad_answer")])
def test_another_answer_before_it_does_not_count(harness: Harness, first: Outcome) -> None:
    assert _second_reason(harness, first, _bad_answer("no")) is Reason.SERVER_ERROR


@pytest.mark.parametrize(
    ("code", "second"), [("stream_unended", Reason.RETRIES_EXHAUSTED), ("stream_cut", Reason.SERVER_ERROR)]
)
def test_the_second_stream_without_an_end_makes_a_job_dead_and_a_second_cut_does_not(
    harness: Harness, code: str, second: Reason
) -> None:
    outcomes = [Outcome(OutcomeKind.RETRY, code=code, message=f"the last event was {end}") for end in ("a", "b")]
    assert _second_reason(harness, *outcomes) is second


def test_a_readable_error_is_retried_although_it_repeats(harness: Harness) -> None:
    assert _second_reason(harness, FAULT, FAULT) is Reason.SERVER_ERROR
