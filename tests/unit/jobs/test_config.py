"""Settings are typed, have units, and refuse what cannot work together."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from jobs.config import ModelConfig, RecordSettings


def test_r84_the_defaults_are_those_of_s1():
    config = ModelConfig()
    assert (config.model_type, config.poll_endpoint_template, config.id_field) == ("sync", None, None)
    assert (config.poll_interval, config.max_poll_time, config.max_retries) == (2.0, 600.0, 50)


def test_r84_flux_is_polled_every_three_seconds_for_twenty_minutes():
    config = ModelConfig(
        model_type="async", poll_endpoint_template="/status/{id}", poll_interval=3.0, max_poll_time=1200
    )
    assert (config.poll_interval, config.max_poll_time) == (3.0, 1200.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_type": "batch"},
        {"poll_endpoint_template": "status/{id}"},
        {"poll_endpoint_template": "/status"},
        {"poll_endpoint_template": "/" + "x" * 500 + "{id}"},
        {"poll_interval": 0},
        {"poll_interval": float("nan")},
        {"poll_interval": 601},
        {"max_poll_time": 8 * 86_400},
        {"max_retries": -1},
        {"max_crashes": 0},
        {"retry_backoff": 31},
        {"retry_backoff": 5, "retry_backoff_max": 4},
        {"max_payload_bytes": 0},
        {"max_waiting": -1},
        {"default_ttl": 0},
        {"policy": "lifo"},
        {"no_such_field": 1},
    ],
)
def test_what_cannot_work_is_refused(wrong):
    with pytest.raises(ValidationError):
        ModelConfig(**wrong)


@pytest.mark.parametrize(
    "right",
    [
        {"poll_endpoint_template": "/v1/jobs/{id}/state"},
        {"poll_interval": 600, "max_poll_time": 600},
        {"max_retries": 0},
        {"max_waiting": 0},
        {"retry_backoff": 30},
        {"policy": "fifo"},
    ],
)
def test_the_limits_themselves_are_allowed(right):
    assert ModelConfig(**right)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError):
        ModelConfig().max_retries = 1


def test_the_record_is_sqlite_in_the_home_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    settings = RecordSettings()
    assert settings.record_url == f"sqlite:///{tmp_path / 'var' / 'record.db'}"
    assert (settings.idempotency_window_s, settings.retention_s) == (86_400, 30 * 86_400)


def test_the_environment_says_where_the_record_lies(monkeypatch):
    monkeypatch.setenv("SLOTKEEPER_HOME", "/srv/slotkeeper")
    assert RecordSettings().home == Path("/srv/slotkeeper")
    assert RecordSettings().record_url == "sqlite:////srv/slotkeeper/record.db"
    monkeypatch.setenv("SLOTKEEPER_DATABASE_URL", "postgresql://db/record")
    assert RecordSettings().record_url == "postgresql://db/record"


@pytest.mark.parametrize("name", ["SLOTKEEPER_IDEMPOTENCY_WINDOW_S", "SLOTKEEPER_RETENTION_S"])
def test_a_span_of_time_is_positive(monkeypatch, name):
    monkeypatch.setenv(name, "0")
    with pytest.raises(ValidationError):
        RecordSettings()
