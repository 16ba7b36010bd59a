"""Fixtures for tests of the API: a module says `pytest_plugins = ("tests.support.api_fixtures",)`.

api          one process's API over a record of its own and a Valkey that all tests share
mortal_api   the same over a Valkey of its own, which the test may kill
timed_api    the same as `api` with a clock that the test sets, for the record and for the room
settings     SLOTKEEPER_* variables beside those; a test parametrizes it
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripting.scripts import Scripts
from tests.lua.room import FRAGMENTS
from tests.support.api import Api, TimedApi, build, clear_wiring
from tests.support.builders import T0
from tests.support.valkey import NoValkey, Valkey


@pytest.fixture(scope="session")
def shared_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """One for all tests that only need some Redis."""
    try:
        with Valkey(tmp_path_factory.mktemp("valkey")) as valkey:
            yield valkey
    except NoValkey as missing:
        pytest.skip(str(missing))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """SLOTKEEPER_* variables that a test adds, by parametrizing, before `api` reads them."""
    return {}


@pytest.fixture
def api(
    shared_valkey: Valkey,
    _sqlite_template: Path,
    tmp_path: Path,
    settings: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Api]:
    shared_valkey.flush()
    yield build(shared_valkey, _sqlite_template, tmp_path / "record", settings, monkeypatch)
    clear_wiring()


@pytest.fixture
def mortal_api(
    _sqlite_template: Path, tmp_path: Path, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Api]:
    with Valkey(tmp_path / "valkey", appendonly=True) as valkey:
        yield build(valkey, _sqlite_template, tmp_path / "record", settings, monkeypatch)
    clear_wiring()


@pytest.fixture
def timed_api(
    shared_valkey: Valkey,
    _sqlite_template: Path,
    tmp_path: Path,
    settings: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TimedApi]:
    shared_valkey.flush()
    monkeypatch.setattr("tasks.wiring.Scripts", lambda redis, keys: Scripts(redis, keys, FRAGMENTS))
    api = build(shared_valkey, _sqlite_template, tmp_path / "record", settings, monkeypatch, TimedApi)
    for module in (
        "dispatch.dispatcher",
        "upkeep.reconcile.reaper",
        "upkeep.reconcile.servers",
        "upkeep.reconcile.timekeeping",
        "upkeep.reconcile.departures",
        "insight.estimates",
        "app.api.servers",
        "app.api.models",
        "app.api.tenants",
    ):
        monkeypatch.setattr(f"{module}.now_ms", lambda: api.now)
    api.set_clock(T0)
    yield api
    clear_wiring()
