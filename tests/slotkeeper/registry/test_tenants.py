"""Tenants: their limits change, and a removal says what it concerns."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.cli.__main__ import main
from routing.queries import job_list
from slotkeeper.audit import AuditFilter, find_entries
from slotkeeper.db import Database
from slotkeeper.errors import Conflict, InvalidRequest, NotFound
from slotkeeper.jobs.states import State
from slotkeeper.jobs.store import JobStore
from slotkeeper.registry.identity import Tenant
from slotkeeper.registry.tenants import Tenants
from tasks.services import database as wired
from tests.support.api import Api
from tests.support.builders import T0, a_queued_job, an_ended_job
from tests.support.keys import identity_of


def test_limits_change_and_the_key_stays(database: Database) -> None:
    tenants = Tenants(database)
    key = tenants.add(Tenant("acme", rate_per_s=2, burst=4), T0).key
    tenants.change("acme", {"rate_per_s": 50})
    assert identity_of(database, key).tenant == Tenant("acme", rate_per_s=50, burst=4)
    tenants.change("acme", {"rate_per_s": None})
    assert identity_of(database, key).tenant == Tenant("acme")
    with pytest.raises(Conflict, match="rate"):
        tenants.change("acme", {"burst": 3})
    assert identity_of(database, key).tenant == Tenant("acme")
    with pytest.raises(NotFound):
        tenants.change("none", {"burst": 3})
    assert [it.act for it in find_entries(database, AuditFilter())] == ["tenant.change", "tenant.change", "tenant.add"]


def test_a_tenant_holds_its_own_jobs_that_have_not_ended(store: JobStore) -> None:
    for tenant in ("acme", "acme", "other"):
        a_queued_job(store, tenant=tenant)
    an_ended_job(store, State.COMPLETED, tenant="acme")
    assert job_list.count_tenant_holdings(store.database, "acme") == job_list.Holdings({State.QUEUED: 2}, 0)


@pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])
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
    home.add(Tenant("acme"), T0)
    a_queued_job(JobStore(home.database), tenant="acme")
    asked = _run("remove", "acme", answer="n\n")
    assert asked.exit_code == 1 and "jobs that have not ended: 1 queued; webhooks: 0" in asked.output
    assert [it.name for it in home.list_all()] == ["acme"]
    assert _run("remove", "acme").exit_code == 1, "nobody has answered"
    assert _run("remove", "acme", "--yes").exit_code == 0
    assert home.list_all() == []
    assert "There is no tenant" in _run("remove", "acme", "--yes").output


def test_a_command_changes_limits(home: Tenants) -> None:
    key = home.add(Tenant("acme", rate_per_s=2), T0).key
    assert _run("change", "acme", "--rate", "50", "--burst", "60").exit_code == 0
    assert identity_of(home.database, key).tenant == Tenant("acme", rate_per_s=50, burst=60)
    assert _run("change", "acme").exit_code == 2


@pytest.mark.parametrize("name", ["me", "default", "validation", "acme/keys"])
def test_a_name_that_means_something_else_is_refused(database: Database, name: str) -> None:
    with pytest.raises((Conflict, InvalidRequest)):
        Tenants(database).add(Tenant(name), T0)
