"""The retry policy of a job never exceeds the configuration of its model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.errors import InvalidJob
from slotkeeper.jobs.terms import JobTerms, OnFailure, decode_terms
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.run_config import apply_terms, read_on_failure

CONFIG = ModelConfig(max_retries=5, retry_backoff=2, retry_backoff_max=10, max_crashes=2, max_poll_time=60)
_seconds = st.floats(0.001, 1e6)
policies = st.builds(
    OnFailure,
    max_retries=st.none() | st.integers(0, 10_000),
    backoff=st.none() | _seconds,
    backoff_max=st.none() | _seconds,
    jitter=st.none() | st.floats(0, 0.25),
    max_crashes=st.none() | st.integers(1, 100),
    max_time=st.none() | _seconds,
)


@given(policies)
def test_a_jobs_policy_never_exceeds_its_models(on_failure: OnFailure) -> None:
    """Whatever a job asked for: its model may have been changed since."""
    config = apply_terms(CONFIG, JobTerms(on_failure=on_failure).encode())
    ModelConfig(**config.model_dump())  # What it says fits together.
    for name in ("max_retries", "retry_backoff", "retry_backoff_max", "max_crashes", "max_poll_time"):
        assert getattr(config, name) <= getattr(CONFIG, name)


def test_a_job_without_terms_runs_by_its_models_configuration() -> None:
    assert apply_terms(CONFIG, None) is CONFIG
    assert apply_terms(CONFIG, JobTerms(expected_output=5).encode()) is CONFIG


def test_the_terms_of_a_job_replace_the_settings_of_its_model_that_they_name() -> None:
    terms = JobTerms(on_failure=OnFailure(max_retries=0, jitter=0.25, max_time=1)).encode()
    config = apply_terms(CONFIG, terms)
    assert (config.max_retries, config.retry_jitter, config.max_poll_time) == (0, 0.25, 1)
    assert (config.poll_interval, config.max_crashes, config.retry_backoff_max) == (1, 2, 10)
    assert {"max_retries", "retry_jitter"} <= config.model_fields_set, "Celery's options do not replace them"


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"max_retries": 80}, "on_failure.max_retries is 80; model 'zimg' allows 5"),
        ({"max_time": 60.5}, "on_failure.max_time is 60.5; model 'zimg' allows 60"),
        ({"jitter": 0.3}, "on_failure.jitter"),
        ({"max_crashes": 0}, "on_failure.max_crashes"),
        ({"max_retries": "1"}, "on_failure.max_retries"),
        ({"retries": 1}, "on_failure.retries"),
        (3, "on_failure"),
    ],
)
def test_a_retry_policy_that_is_invalid_or_exceeds_the_model_configuration_is_refused(
    given: object, expected: str
) -> None:
    with pytest.raises(InvalidJob) as refused:
        read_on_failure(given, "zimg", CONFIG)
    assert expected in refused.value.detail and refused.value.field.startswith("on_failure")


def test_unknown_terms_of_a_later_release_are_ignored() -> None:
    assert decode_terms('{"expected_output": 7, "later": {"a": 1}}') == JobTerms(expected_output=7)
    assert JobTerms().encode() is None
