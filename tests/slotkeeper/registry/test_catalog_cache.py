"""A process's cached catalog: never older than its refresh time, and available without the database."""

import threading
import time
from typing import Any

import pytest

from slotkeeper.db.time_limits import LOOK_S, time_left, time_limit
from slotkeeper.errors import DatabaseUnavailable, UnknownModel
from slotkeeper.registry.catalog_cache import CatalogCache
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
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

    def get_version(self) -> int:
        self.looks += 1
        if self.away:
            raise DatabaseUnavailable("away")
        return self.number

    def read(self) -> CatalogSnapshot:
        self.reads += 1
        if self.away:
            raise DatabaseUnavailable("away")
        return CatalogSnapshot(self.number, {model.name: model for model in self.models}, {})

    def read_after(self, former: CatalogSnapshot) -> CatalogSnapshot:
        return self.read()


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
def cache(catalog: FakeCatalog, clock: Clock) -> CatalogCache:
    return CatalogCache(catalog, 1.0, clock)  # type: ignore[arg-type]


def test_the_cache_does_not_query_the_database_within_its_refresh_time(cache, catalog, clock):
    first = cache.get()
    clock.now = 0.99
    assert cache.get() is first
    assert (catalog.looks, catalog.reads) == (0, 1)


def test_after_its_refresh_time_the_cache_reads_the_version_and_the_catalog_only_if_it_changed(cache, catalog, clock):
    first = cache.get()
    clock.now = 1.0
    assert cache.get() is first
    assert (catalog.looks, catalog.reads) == (1, 1)
    catalog.register(a_model("flux"))
    clock.now = 2.0
    assert set(cache.get().models) == {"zimg", "flux"}
    assert (catalog.looks, catalog.reads) == (2, 2)


def test_a_refresh_reads_the_catalog_at_once(cache, catalog):
    cache.get()
    catalog.register(a_model("flux"))
    assert set(cache.refresh().models) == {"zimg", "flux"}


def test_a_model_that_was_registered_just_now_is_found_by_a_second_look(cache, catalog):
    cache.get()
    catalog.register(a_model("flux"))
    assert cache.resolve("flux").name == "flux"
    assert cache.resolve("flux") is cache.resolve("flux") and catalog.reads == 2


def test_the_error_for_an_unregistered_model_names_the_remedy(cache):
    with pytest.raises(UnknownModel, match="POST /admin/register") as refused:
        cache.resolve("nobody")
    assert refused.value.field == "model"


def test_while_the_database_is_down_the_cached_catalog_is_used(cache, catalog, clock):
    first = cache.get()
    catalog.away = True
    clock.now = 60.0
    assert cache.get() is first and cache.refresh() is first
    assert cache.resolve("zimg").name == "zimg"
    with pytest.raises(UnknownModel):
        cache.resolve("nobody")


def test_a_database_that_is_down_is_read_once_per_interval_and_not_at_each_call(cache, catalog, clock):
    cache.get()
    catalog.away = True
    clock.now = 5.0
    for _ in range(100):
        cache.get()
    assert catalog.looks == 1


def test_a_process_that_never_read_the_catalog_cannot_do_without_the_database(cache, catalog):
    catalog.away = True
    with pytest.raises(DatabaseUnavailable):
        cache.get()
    with pytest.raises(DatabaseUnavailable):
        cache.resolve("zimg")
    catalog.away = False
    assert cache.resolve("zimg").name == "zimg"


def test_many_threads_at_once_read_the_catalog_once(cache, catalog):
    found = at_once(*[cache.get] * 8)
    assert len({id(snapshot) for snapshot in found}) <= 8 and catalog.reads == 1


def test_a_refresh_of_the_catalog_uses_a_small_part_of_the_time_limit_of_a_request(cache, catalog, monkeypatch):
    cache.get()
    left = []
    monkeypatch.setattr(catalog, "get_version", lambda: left.append(time_left()) or catalog.number)
    with time_limit(100):
        cache.refresh()
    assert 0 < left[0] <= LOOK_S


def test_threads_that_wait_for_a_concurrent_refresh_do_not_refresh_again(catalog):
    cache = CatalogCache(catalog, 0.0)  # type: ignore[arg-type]
    cache.get()
    asking, catalog.away = threading.Semaphore(0), True
    looked = catalog.get_version

    def get_version() -> int:
        for _ in range(7):  # The other threads wait for the lock.
            assert asking.acquire(timeout=10)
        return looked()

    class Clock:
        def __call__(self) -> float:
            asking.release()
            return time.monotonic()

    cache._clock = Clock()
    catalog.get_version = get_version  # type: ignore[method-assign]
    at_once(*[cache.refresh] * 8)
    assert catalog.looks == 1
