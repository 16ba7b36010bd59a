"""Settings are typed, have units, and refuse what cannot work together."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from slotkeeper.config import StorageSettings
from slotkeeper.errors import InvalidSetting
from slotkeeper.registry.model_config import ModelConfig, parse_overrides
from slotkeeper.registry.policies import POLICIES
from tasks.config import EventSettings, TaskSettings
from tests.support.builders import one_of

NAN, INFINITE = float("nan"), float("inf")


def test_the_defaults_are_what_they_were():
    config = ModelConfig()
    assert (config.model_type, config.poll_endpoint_template, config.id_field) == ("sync", None, None)
    assert (config.poll_interval, config.max_poll_time, config.max_retries) == (2.0, 600.0, 50)


def test_flux_is_polled_every_three_seconds_for_twenty_minutes():
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
        {"policy": "no_such_policy"},
        {"no_such_field": 1},
        {"tier_head_start": 0},
        {"tier_head_start": NAN},
        {"tier_head_start": 7 * 86_400 + 1},
        {"weights": {"acme": 0}},
        {"weights": {"acme": -1}},
        {"weights": {"acme": 0.0009}},
        {"weights": {"acme": 1001}},
        {"weights": {"": 1}},
        {"weights": {7: 1}},
        {"weights": {f"t{n}": 1 for n in range(10_001)}},
        {"weights": None},
        {"tenant_slots": 0},
        {"tenant_slots": 1.5},
        {"tenant_slot_limits": {"acme": 0}},
        {"tenant_slot_limits": {"": 1}},
        {"tenant_slot_limits": {f"t{n}": 1 for n in range(10_001)}},
        {"capacity": -1},
        {"capacity_per_slot": -1},
        {"affinity": -1},
        {"affinity": 3601},
        {"unmatched": "ignore"},
        {"breaker_failures": 0},
        {"breaker_failures": 10_001},
    ],
)
def test_an_invalid_model_configuration_is_refused(wrong):
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
        {"policy": "aging", "tier_head_start": 7 * 86_400},
        {"policy": "fair", "weights": {"acme": 0.001, "umbrella": 1000}},
        {"policy": "fifo", "weights": {"acme": 2}},  # kept for the day on which the policy is fair
        {"weights": {f"t{n}": 1 for n in range(10_000)}},
        {"tenant_slots": 1, "tenant_slot_limits": {"acme": 1}},
        {"tenant_slot_limits": {"acme": 3}},
        {"capacity": 0, "capacity_per_slot": 0},
        {"capacity": 10_000, "max_waiting": 5},
        {"affinity": 0},
        {"affinity": 3600},
        {"unmatched": "refuse"},
        {"breaker_failures": 1},
        {"breaker_failures": 10_000},
    ],
)
def test_the_limits_themselves_are_allowed(right):
    assert ModelConfig(**right)


_NUMBERS = ("tier_head_start", "tenant_slots", "capacity", "capacity_per_slot", "affinity", "breaker_failures")
_BY_TENANT = ("weights", "tenant_slot_limits")


@pytest.mark.parametrize("wrong", [True, "1", NAN, INFINITE, -INFINITE, [1]])
@pytest.mark.parametrize("name", [*_NUMBERS, *_BY_TENANT])
def test_only_a_finite_number_is_accepted_as_a_number(name, wrong):
    with pytest.raises(ValidationError) as refused:
        ModelConfig(**{name: {"acme": wrong} if name in _BY_TENANT else wrong})
    (fault,) = refused.value.errors()
    assert fault["loc"] == ((name, "acme") if name in _BY_TENANT else (name,))  # the error names the field


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"weights": {"acme": 0}}, "greater than or equal to 0.001"),
        ({"weights": {"acme": NAN}}, "finite number"),
        ({"tenant_slots": 0}, "greater than or equal to 1"),
        ({"capacity": -1}, "greater than or equal to 0"),
        ({"policy": "no_such_policy"}, one_of(POLICIES)),
        ({"unmatched": "ignore"}, "'accept' or 'refuse'"),
        ({"weights": {f"t{n}": 1 for n in range(10_001)}}, "at most 10000 items"),
    ],
)
def test_a_validation_error_names_the_valid_values(wrong, remedy):
    with pytest.raises(ValidationError, match=remedy):
        ModelConfig(**wrong)


def test_optional_policies_are_off_by_default():
    config = ModelConfig()
    assert (config.policy, config.capacity, config.capacity_per_slot, config.max_waiting) == ("priority",) + (None,) * 3
    assert (config.tenant_slots, config.tenant_slot_limits, config.weights) == (None, {}, {})
    assert config.unmatched == "accept"


@pytest.mark.parametrize("variable", ["SLOTKEEPER_BROKER_URL", "SLOTKEEPER_REDIS_URL"])
def test_a_broker_of_an_unknown_kind_is_refused(variable, monkeypatch):
    monkeypatch.setenv(variable, "nonsense://somewhere")
    with pytest.raises(InvalidSetting, match=f"^{variable} (names no broker|is not the URL of a Redis)"):
        _ = TaskSettings().broker


def test_overrides_of_a_newer_release_count_as_not_set():
    stored = {"max_retries": 7, "policy": "auction", "gravity": 9.81, "affinity": -1}
    assert parse_overrides(stored) == (ModelConfig(max_retries=7), {"policy", "gravity", "affinity"})
    assert parse_overrides({"max_retries": 7}) == (ModelConfig(max_retries=7), set())


def test_stored_values_that_contradict_each_other_all_count_as_not_set():
    stored = {"retry_backoff": 5, "retry_backoff_max": 4}
    assert parse_overrides(stored) == (ModelConfig(), set(stored))


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError):
        ModelConfig().max_retries = 1


def test_the_default_database_is_sqlite_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    settings = StorageSettings()
    assert settings.sqlalchemy_url == f"sqlite:///{tmp_path / 'var' / 'record.db'}"
    assert (settings.idempotency_window_s, settings.retention_s) == (86_400, 30 * 86_400)


def test_the_environment_sets_the_location_of_the_database(monkeypatch):
    monkeypatch.setenv("SLOTKEEPER_HOME", "/srv/slotkeeper")
    assert StorageSettings().home == Path("/srv/slotkeeper")
    assert StorageSettings().sqlalchemy_url == "sqlite:////srv/slotkeeper/record.db"
    monkeypatch.setenv("SLOTKEEPER_DATABASE_URL", "postgresql://db/record")
    assert StorageSettings().sqlalchemy_url == "postgresql://db/record"


@pytest.mark.parametrize("name", ["SLOTKEEPER_IDEMPOTENCY_WINDOW_S", "SLOTKEEPER_RETENTION_S"])
def test_a_span_of_time_is_positive(monkeypatch, name):
    monkeypatch.setenv(name, "0")
    with pytest.raises(InvalidSetting):
        StorageSettings()


def test_a_setting_that_is_not_json_is_refused_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTKEEPER_EVENTS_KAFKA_OPTIONS", "{s3cret")
    with pytest.raises(InvalidSetting, match=r"^SLOTKEEPER_EVENTS_KAFKA_OPTIONS is wrong: it is not JSON\.$"):
        EventSettings()
