"""Tenants: limits change, keys rotate with an overlap, and a removal says what it concerns."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.cli.__main__ import main
from routing.queries import job_list
from slotkeeper.audit import AuditFilter, find_entries
from slotkeeper.db import Database
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.jobs.states import State
from slotkeeper.jobs.store import JobStore
from slotkeeper.registry.tenants import Tenant, Tenants
from tasks.services import database as wired
from tests.support.api import Api
from tests.support.builders import T0, a_queued_job, an_ended_job
from tests.support.clock import set_clock

HOUR_MS = 3_600_000


def test_both_keys_are_valid_until_the_overlap_is_over(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants, acme = Tenants(database), Tenant("acme", admin=False, rate_per_s=3)
    old = tenants.add(acme, T0)
    new = tenants.rotate_key("acme", HOUR_MS, T0)
    set_clock(monkeypatch, lambda: T0 + HOUR_MS - 1)
    assert [tenants.find_by_key(key) for key in (old, new)] == [acme, acme]
    assert set(tenants.list_by_hash().values()) == {acme} and len(tenants.list_by_hash()) == 2
    set_clock(monkeypatch, lambda: T0 + HOUR_MS)
    assert [tenants.find_by_key(key) for key in (old, new)] == [None, acme]
    assert len(tenants.list_by_hash()) == 1


def test_only_the_two_latest_keys_are_valid(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = Tenants(database)
    keys = [tenants.add(Tenant("acme", admin=False), T0), *(tenants.rotate_key("acme", HOUR_MS, T0) for _ in range(2))]
    set_clock(monkeypatch, lambda: T0 + 1)
    assert [tenants.find_by_key(key) is not None for key in keys] == [False, True, True]
    tenants.remove("acme")
    assert [tenants.find_by_key(key) for key in keys] == [None, None, None]


def test_a_key_rotated_without_an_overlap_stops_at_once(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = Tenants(database)
    old = tenants.add(Tenant("acme", admin=False), T0)
    set_clock(monkeypatch, lambda: T0)
    tenants.rotate_key("acme", 0, T0)
    assert tenants.find_by_key(old) is None


def test_limits_change_and_the_key_stays(database: Database) -> None:
    tenants = Tenants(database)
    key = tenants.add(Tenant("acme", admin=False, rate_per_s=2, burst=4), T0)
    tenants.change("acme", {"rate_per_s": 50})
    assert tenants.find_by_key(key) == Tenant("acme", admin=False, rate_per_s=50, burst=4)
    tenants.change("acme", {"rate_per_s": None})
    assert tenants.find_by_key(key) == Tenant("acme", admin=False)
    with pytest.raises(Conflict, match="rate"):
        tenants.change("acme", {"burst": 3})
    assert tenants.find_by_key(key) == Tenant("acme", admin=False)
    for act in (lambda: tenants.change("none", {"burst": 3}), lambda: tenants.rotate_key("none", 0, T0)):
        with pytest.raises(NotFound):
            act()
    assert [it.act for it in find_entries(database, AuditFilter())] == ["tenant.change", "tenant.change", "tenant.add"]


def test_a_tenant_holds_its_own_jobs_that_have_not_ended(store: JobStore) -> None:
    for tenant in ("acme", "acme", "other"):
        a_queued_job(store, tenant=tenant)
    an_ended_job(store, State.COMPLETED, tenant="acme")
    assert job_list.count_tenant_holdings(store.database, "acme") == job_list.Holdings({State.QUEUED: 2}, 0)


@pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "KEY_CACHE_S": "0"}])
def test_an_administrator_changes_limits_over_rest(api: Api, settings: dict[str, str]) -> None:
    root, acme = api.tenant("root", admin=True), api.tenant("acme")
    path = "/admin/tenants/acme"
    told = api.client.patch(path, json={"rate_per_s": 7, "burst": 9}, headers=root).json
    assert (told["rate_per_s"], told["burst"], told["state"]) == (7, 9, "online")
    told = api.client.patch(path, json={"state": "paused", "burst": None}, headers=root).json
    assert (told["rate_per_s"], told["burst"], told["state"]) == (7, None, "paused")
    assert api.client.patch(path, json={}, headers=root).json["rate_per_s"] == 7
    assert api.client.patch(path, json={"rate_per_s": 0}, headers=root).status_code == 422
    assert api.client.patch(path, json={"rate_per_s": None, "burst": 2}, headers=root).status_code == 409
    assert api.client.patch("/admin/tenants/none", json={"burst": 2}, headers=root).status_code == 404
    assert api.client.patch(path, json={"rate_per_s": 99}, headers=acme).status_code == 403


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tenants]:
    """An installation whose commands work on the record in a folder."""
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path))
    monkeypatch.delenv("SLOTKEEPER_DATABASE_URL", raising=False)
    wired.cache_clear()
    assert CliRunner().invoke(main, ["migrate"]).exit_code == 0
    yield Tenants(wired())
    wired().close()
    wired.cache_clear()


def _run(*words: str, answer: str = "") -> Result:
    return CliRunner().invoke(main, ["tenants", *words], input=answer)


def test_a_removal_says_what_the_tenant_has_and_asks(home: Tenants) -> None:
    home.add(Tenant("acme", admin=False), T0)
    a_queued_job(JobStore(home.database), tenant="acme")
    asked = _run("remove", "acme", answer="n\n")
    assert asked.exit_code == 1 and "jobs that have not ended: 1 queued; webhooks: 0" in asked.output
    assert [it.name for it in home.list_all()] == ["acme"]
    assert _run("remove", "acme").exit_code == 1, "nobody has answered"
    assert _run("remove", "acme", "--yes").exit_code == 0
    assert home.list_all() == []
    assert "There is no tenant" in _run("remove", "acme", "--yes").output


def test_commands_change_and_rotate(home: Tenants) -> None:
    old = home.add(Tenant("acme", admin=False, rate_per_s=2), T0)
    assert _run("change", "acme", "--rate", "50", "--burst", "60").exit_code == 0
    assert home.find_by_key(old) == Tenant("acme", admin=False, rate_per_s=50, burst=60)
    new = _run("rotate", "acme", "--overlap", "1h").stdout.strip()
    assert home.find_by_key(old) == home.find_by_key(new) != None  # noqa: E711
    assert _run("change", "acme").exit_code == 2
    for wrong in ("1", "1w", "31d", "-1h", ""):
        assert _run("rotate", "acme", "--overlap", wrong).exit_code == 2
