"""A process's copy of the catalog: never older than a moment, and still there while the database is away."""

from typing import Any

import pytest

from jobs.catalog import Model, Snapshot
from jobs.config import ModelConfig
from jobs.errors import RecordUnavailable, UnknownModel
from routing.fleet import Fleet
from tests.support.builders import at_once


def a_model(name: str, **config: Any) -> Model:
    return Model(name, name, config, ModelConfig(**config))


class FakeCatalog:
    """Counts what is asked of it."""

    def __init__(self, *models: Model) -> None:
        self.models, self.number, self.away = list(models), 1, False
        self.looks = self.reads = 0

    def register(self, *models: Model) -> None:
        self.models += models
        self.number += 1

    def version(self) -> int:
        self.looks += 1
        if self.away:
            raise RecordUnavailable("away")
        return self.number

    def snapshot(self) -> Snapshot:
        self.reads += 1
        if self.away:
            raise RecordUnavailable("away")
        return Snapshot(self.number, {model.name: model for model in self.models}, {})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def catalog() -> FakeCatalog:
    return FakeCatalog(a_model("zimg"))


@pytest.fixture
def fleet(catalog: FakeCatalog, clock: Clock) -> Fleet:
    return Fleet(catalog, 1.0, clock)  # type: ignore[arg-type]


def test_within_a_moment_nobody_asks_again(fleet, catalog, clock):
    first = fleet.snapshot()
    clock.now = 0.99
    assert fleet.snapshot() is first
    assert (catalog.looks, catalog.reads) == (0, 1)


def test_after_a_moment_the_version_is_asked_for_and_the_rest_only_if_it_has_changed(fleet, catalog, clock):
    first = fleet.snapshot()
    clock.now = 1.0
    assert fleet.snapshot() is first
    assert (catalog.looks, catalog.reads) == (1, 1)
    catalog.register(a_model("flux"))
    clock.now = 2.0
    assert set(fleet.snapshot().models) == {"zimg", "flux"}
    assert (catalog.looks, catalog.reads) == (2, 2)


def test_a_refresh_asks_at_once(fleet, catalog):
    fleet.snapshot()
    catalog.register(a_model("flux"))
    assert set(fleet.refresh().models) == {"zimg", "flux"}


def test_a_model_that_was_registered_just_now_is_found_by_a_second_look(fleet, catalog):
    fleet.snapshot()
    catalog.register(a_model("flux"))
    assert fleet.model("flux").name == "flux"
    assert fleet.model("flux") is fleet.model("flux") and catalog.reads == 2


def test_a_model_that_nobody_registered_is_unknown_and_the_remedy_is_named(fleet):
    with pytest.raises(UnknownModel, match="POST /admin/register") as refused:
        fleet.model("nobody")
    assert refused.value.field == "model"


def test_while_the_database_is_away_the_last_copy_serves(fleet, catalog, clock):
    first = fleet.snapshot()
    catalog.away = True
    clock.now = 60.0
    assert fleet.snapshot() is first and fleet.refresh() is first
    assert fleet.model("zimg").name == "zimg"
    with pytest.raises(UnknownModel):
        fleet.model("nobody")


def test_while_the_database_is_away_it_is_asked_once_a_moment_and_not_at_each_call(fleet, catalog, clock):
    fleet.snapshot()
    catalog.away = True
    clock.now = 5.0
    for _ in range(100):
        fleet.snapshot()
    assert catalog.looks == 1


def test_a_process_that_never_read_the_catalog_cannot_do_without_the_database(fleet, catalog):
    catalog.away = True
    with pytest.raises(RecordUnavailable):
        fleet.snapshot()
    with pytest.raises(RecordUnavailable):
        fleet.model("zimg")
    catalog.away = False
    assert fleet.model("zimg").name == "zimg"


def test_many_threads_at_once_read_the_catalog_once(fleet, catalog):
    found = at_once(*[fleet.snapshot] * 8)
    assert len({id(it) for it in found}) <= 8 and catalog.reads == 1
