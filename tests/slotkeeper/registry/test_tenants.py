"""The limits of a tenant can be changed, and its removal reports what it affects."""

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
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.identity import Tenant
from slotkeeper.registry.tenant_limits import INSTALLATION, RateLimit, TenantLimits
from slotkeeper.registry.tenants import Tenants
from tasks.services import database as wired
from tests.support.api import Api
from tests.support.builders import T0, a_queued_job, an_ended_job
from tests.support.keys import identity_of


def test_limits_change_and_the_key_stays(database: Database) -> None:
    tenants, catalog = Tenants(database), Catalog(database)
    key = tenants.add(Tenant("acme"), T0, limits=TenantLimits(rate_per_s=2, burst=4)).key
    former = catalog.read()
    assert former.limits_of("acme") == TenantLimits(rate_per_s=2, burst=4)
    tenants.change("acme", {"rate_per_s": 50, "models": ["zimg"]}, T0)
    after = catalog.read_after(former)
    assert after.limits_of("acme") == TenantLimits(rate_per_s=50, burst=4, models=["zimg"])
    assert after.limits_of("other") == TenantLimits() and after.limits == catalog.read().limits
    tenants.change("acme", {"rate_per_s": None, "models": None}, T0)
    assert catalog.read_after(after).limits_of("acme") == TenantLimits()
    with pytest.raises(InvalidRequest, match="rate"):
        tenants.change("acme", {"burst": 3}, T0)
    assert identity_of(database, key).tenant == Tenant("acme")
    with pytest.raises(NotFound):
        tenants.change("none", {"burst": 3}, T0)
    acts = [entry.act for entry in find_entries(database, AuditFilter())]
    assert acts == ["tenant.change", "tenant.change", "tenant.add"]


def test_the_installation_and_those_without_a_key_have_limits_and_are_no_tenants(database: Database) -> None:
    tenants, catalog = Tenants(database), Catalog(database)
    tenants.change(INSTALLATION, {"max_waiting": 7, "rate_per_s": 3, "burst": 9}, T0)
    tenants.change("default", {"rate_per_s": 5}, T0)
    limits = catalog.read()
    assert limits.limits_of("default") == TenantLimits(max_waiting=7, rate_per_s=5)
    assert limits.limits_of("other") == TenantLimits(max_waiting=7, rate_per_s=3, burst=9)
    assert tenants.list_all() == []


def test_the_holdings_of_a_tenant_count_its_active_jobs_only(store: JobStore) -> None:
    for tenant in ("acme", "acme", "other"):
        a_queued_job(store, tenant=tenant)
    an_ended_job(store, State.COMPLETED, tenant="acme")
    assert job_list.count_tenant_holdings(store.database, "acme") == job_list.Holdings({State.QUEUED: 2}, 0)


@pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])
def test_an_administrator_changes_limits_over_rest(api: Api, settings: dict[str, str]) -> None:
    root, acme = api.tenant("root", admin=True), api.tenant("acme")
    path = "/admin/tenants/acme"
    changed = api.client.patch(path, json={"rate_per_s": 7, "burst": 9}, headers=root).json
    assert (changed["rate_per_s"], changed["burst"], changed["state"]) == (7, 9, "online")
    changed = api.client.patch(path, json={"state": "paused", "burst": None}, headers=root).json
    assert (changed["rate_per_s"], changed["burst"], changed["state"]) == (7, None, "paused")
    changed = api.client.patch(path, json={"limits": {"max_waiting": 5, "most_urgent": 4}}, headers=root).json
    assert {name: value for name, value in changed["limits"].items() if value} == {
        "rate_per_s": 7,
        "max_waiting": 5,
        "most_urgent": 4,
    }
    assert api.client.patch("/admin/limits", json={"max_payload_bytes": 9}, headers=root).status_code == 200
    own = api.client.get("/tenants/me", headers=acme).json
    assert (own["tenant"], own["state"], own["limits"]["max_payload_bytes"]) == ("acme", "paused", 9)
    assert own["scopes"] == ["submit", "read", "manage"]
    assert api.client.get("/tenants/root", headers=acme).status_code == 404
    assert api.client.patch(path, json={}, headers=root).json["rate_per_s"] == 7
    assert api.client.patch(path, json={"rate_per_s": 0}, headers=root).status_code == 422
    assert api.client.patch(path, json={"rate_per_s": None, "burst": 2}, headers=root).status_code == 422
    assert api.client.patch("/admin/tenants/none", json={"burst": 2}, headers=root).status_code == 404
    assert api.client.patch(path, json={"rate_per_s": 99}, headers=acme).status_code == 403


@pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])
def test_the_rate_limit_headers_name_the_remaining_submits(api: Api, settings: dict[str, str]) -> None:
    root, acme = api.tenant("root", admin=True), api.tenant("acme")
    api.client.put("/admin/model-configs/zimg", json={}, headers=root)
    assert "RateLimit" not in api.submit(acme).headers
    api.client.patch("/admin/tenants/acme", json={"rate_per_s": 0.01, "burst": 2}, headers=root)
    answers = [api.submit(acme) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    assert [answer.headers["RateLimit-Policy"] for answer in answers] == ['"tenant";q=2;w=200'] * 3
    assert [answer.headers["RateLimit"] for answer in answers] == [
        '"tenant";r=1;t=100',
        '"tenant";r=0;t=200',
        '"tenant";r=0;t=200',
    ]
    assert answers[2].json["limit"] == "tenant" and 95 <= int(answers[2].headers["Retry-After"]) <= 100
    key = api.client.post(
        "/tenants/acme/keys", json={"scopes": ["submit"], "rate_per_s": 0.01, "burst": 1}, headers=root
    ).json
    api.client.patch("/admin/tenants/acme", json={"rate_per_s": None}, headers=root)
    with_key = {"Authorization": f"Bearer {key['key']}"}
    assert [api.submit(with_key).status_code for _ in range(2)] == [202, 429]
    assert api.submit(acme).status_code == 202


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tenants]:
    """An installation whose commands use a database in a folder."""
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path))
    monkeypatch.delenv("SLOTKEEPER_DATABASE_URL", raising=False)
    wired.cache_clear()
    assert CliRunner().invoke(main, ["migrate"]).exit_code == 0
    yield Tenants(wired())
    wired().close()
    wired.cache_clear()


def _run(*words: str, answer: str = "") -> Result:
    return CliRunner().invoke(main, ["tenants", *words], input=answer)


def test_a_removal_lists_what_the_tenant_has_and_asks_for_confirmation(home: Tenants) -> None:
    home.add(Tenant("acme"), T0)
    a_queued_job(JobStore(home.database), tenant="acme")
    asked = _run("remove", "acme", answer="n\n")
    assert asked.exit_code == 1 and "jobs that have not ended: 1 queued; webhooks: 0" in asked.output
    assert [tenant.name for tenant in home.list_all()] == ["acme"]
    assert _run("remove", "acme").exit_code == 1, "the prompt got no answer"
    assert _run("remove", "acme", "--yes").exit_code == 0
    assert home.list_all() == []
    assert "There is no tenant" in _run("remove", "acme", "--yes").output


def test_a_command_changes_limits(home: Tenants) -> None:
    home.add(Tenant("acme"), T0)
    given = ("--rate", "50", "--burst", "60", "--model", "zimg", "--model-rate", "zimg=0.5:2", "--max-waiting", "9")
    assert _run("change", "acme", *given).exit_code == 0
    limits = Catalog(home.database).read().limits_of("acme")
    assert limits == TenantLimits(
        rate_per_s=50,
        burst=60,
        models=["zimg"],
        model_rates={"zimg": RateLimit(rate_per_s=0.5, burst=2)},
        max_waiting=9,
        most_urgent=4,  # that of a new installation
    )
    assert "max_waiting" in _run("show", "acme").stdout
    assert _run("change", "acme", "--max-waiting", "0", "--all-models").exit_code == 0
    limits = Catalog(home.database).read().limits_of("acme")
    assert (limits.max_waiting, limits.models, limits.rate_per_s) == (None, None, 50)
    assert _run("change", "--all", "--most-urgent", "3").exit_code == 0
    assert Catalog(home.database).read().limits_of("other").most_urgent == 3
    for wrong in (("acme",), ("acme", "--all", "--rate", "1"), ("--rate", "1"), ("acme", "--model-rate", "zimg")):
        assert _run("change", *wrong).exit_code == 2, wrong


@pytest.mark.parametrize("name", ["me", "default", "validation", "acme/keys"])
def test_a_name_that_means_something_else_is_refused(database: Database, name: str) -> None:
    with pytest.raises((Conflict, InvalidRequest)):
        Tenants(database).add(Tenant(name), T0)
