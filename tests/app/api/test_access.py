"""Requests that the API accepts without a key, with a valid key and with a wrong key."""

import re
from typing import Any, cast

import pytest

from app.auth import access
from app.config import AppSettings
from app.factory import create_app, create_routes
from slotkeeper.clock import now_ms
from slotkeeper.errors import InvalidSetting
from slotkeeper.jobs.states import State
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.tenants import Tenants
from tests.support.api import Api
from tests.support.builders import an_ended_job
from tests.support.clock import set_clock

KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])
OPEN = [("get", "/health/live"), ("get", "/health/ready"), ("get", "/openapi.json"), ("get", "/docs/swagger")]
METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE"}
ROUTES = create_routes()
# Every view that requires a scope: (method, path, scope).  Names in paths are those of nothing.
SCOPED = sorted(
    (method.lower(), re.sub("<(?:[^:>]*:)?([^>]*)>", r"\1", rule.rule), scope)
    for rule in ROUTES.url_map.iter_rules()
    if (scope := access.scope_of(ROUTES, rule.endpoint)) is not None
    for method in METHODS & (rule.methods or set())
    if not any(getattr(ROUTES.view_functions[rule.endpoint], mark, False) for mark in access._MARKS)
)
OF_KEYS = [(method, path) for method, path, _ in SCOPED] + [("get", "/metrics"), ("get", "/models/model/stats")]


def _ask(api: Api, method: str, path: str, **more: Any) -> Any:
    body = {"json": {}} if method in ("post", "put", "patch") else {}
    return getattr(api.client, method)(path, **body, **more)


# -- keys ------------------------------------------------------------------------------------------------------


@KEYED
@pytest.mark.parametrize(
    "header", [{}, {"Authorization": "Bearer sk_wrong"}, {"Authorization": "Basic eDp5"}, {"Authorization": "Bearer"}]
)
@pytest.mark.parametrize("method, path", OF_KEYS)
def test_a_request_without_a_valid_key_is_refused(
    api: Api, settings: dict[str, str], method: str, path: str, header: dict[str, str]
) -> None:
    answer = _ask(api, method, path, headers=header)
    assert (answer.status_code, answer.json["code"]) == (401, "unauthorized")
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")


@KEYED
@pytest.mark.parametrize("method, path", OPEN)
def test_health_and_the_documentation_ask_for_no_key(
    api: Api, settings: dict[str, str], method: str, path: str
) -> None:
    assert _ask(api, method, path).status_code == 200


@KEYED
@pytest.mark.parametrize("method, path, scope", SCOPED)
def test_a_key_opens_only_what_its_scopes_say(
    api: Api, settings: dict[str, str], method: str, path: str, scope: Scope
) -> None:
    for given in Scope:
        answer = _ask(api, method, path, headers=api.with_key("acme", given))
        if given in (scope, Scope.OPERATE):
            assert answer.status_code != 401 and answer.json.get("code") != "scope_missing", given
        else:
            assert (answer.status_code, answer.json["code"], answer.json["scope"]) == (403, "scope_missing", scope)


@KEYED
@pytest.mark.parametrize("path", ["/metrics", "/models/zimg/stats"])
def test_figures_of_all_tenants_are_for_operators(api: Api, settings: dict[str, str], path: str) -> None:
    api.client.put("/admin/model-configs/zimg", json={}, headers=api.with_key("root", Scope.OPERATE))
    assert _ask(api, "get", path, headers=api.with_key("acme", *(set(Scope) - {Scope.OPERATE}))).status_code == 403
    assert _ask(api, "get", path, headers=api.with_key("acme", Scope.OPERATE)).status_code == 200


def test_a_view_without_a_scope_stops_the_application() -> None:
    app = create_routes()
    app.add_url_rule("/new", "new", lambda: "")
    with pytest.raises(AssertionError, match="the view new has no scope"):
        access.configure_access(app, AppSettings(), cast(Any, None))


@KEYED
def test_a_refusal_names_the_scopes_of_the_key_and_the_scope_that_is_required(
    api: Api, settings: dict[str, str]
) -> None:
    answer = _ask(api, "post", "/queue/submit", headers=api.with_key("acme", Scope.READ, Scope.AUDIT))
    assert answer.json["detail"] == "This needs a key with the scope submit, and this key has: read audit."
    key = api.with_key("acme", Scope.READ)["Authorization"]
    mistyped = key[:-1] + ("x" if key[-1] != "x" else "y")
    assert "mistyped" in _ask(api, "get", "/queue/jobs", headers={"Authorization": mistyped}).json["detail"]


@KEYED
def test_a_revoked_or_expired_key_opens_nothing(
    api: Api, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = api.with_key("acme", Scope.READ, Scope.KEYS)
    short = api.client.post("/tenants/me/keys", json={"scopes": ["read"], "expires_in_s": 60}, headers=keys).json
    header = {"Authorization": f"Bearer {short['key']}"}
    assert api.client.get("/queue/jobs", headers=header).status_code == 200
    later = now_ms() + 60_000
    set_clock(monkeypatch, lambda: later)
    assert api.client.get("/queue/jobs", headers=header).status_code == 401
    own = keys["Authorization"].removeprefix("Bearer ")[3:15]
    assert api.client.delete(f"/tenants/acme/keys/{own}", headers=keys).status_code == 204
    assert api.client.get("/queue/jobs", headers=keys).status_code == 401


@KEYED
def test_a_key_creates_changes_and_revokes_no_key_with_more_scopes(api: Api, settings: dict[str, str]) -> None:
    boss, small = api.with_key("acme", Scope.OPERATE), api.with_key("acme", Scope.KEYS, Scope.READ)
    id_of_boss = boss["Authorization"].removeprefix("Bearer ")[3:15]
    path = f"/tenants/me/keys/{id_of_boss}"
    refused = [
        api.client.post("/tenants/me/keys", json={"scopes": ["read", "submit"]}, headers=small),
        api.client.post("/tenants/me/keys", json={"scopes": ["operate"]}, headers=small),
        api.client.post(f"{path}/rotate", json={}, headers=small),
        api.client.patch(path, json={"scopes": ["read"]}, headers=small),
        api.client.delete(path, headers=small),
    ]
    assert [(answer.status_code, answer.json["code"]) for answer in refused] == [(403, "scope_missing")] * 5
    made = api.client.post("/tenants/me/keys", json={"name": "board", "scopes": ["read"]}, headers=small)
    assert made.status_code == 201 and made.headers["Cache-Control"] == "no-store"
    listed = api.client.get("/tenants/acme/keys", headers=small).json["keys"]
    assert len(listed) == 3 and made.json["key"] not in str(listed)
    assert api.client.delete(path, headers=boss).status_code == 409, "the last key with the scope operate"


@KEYED
def test_the_keys_of_another_tenant_do_not_exist(api: Api, settings: dict[str, str]) -> None:
    zeta, acme = api.with_key("zeta", Scope.KEYS, Scope.READ), api.with_key("acme", Scope.READ)
    key_id = acme["Authorization"].removeprefix("Bearer ")[3:15]
    assert api.client.get("/tenants/acme/keys", headers=zeta).status_code == 404
    for tenant in ("acme", "me", "zeta"):
        assert api.client.delete(f"/tenants/{tenant}/keys/{key_id}", headers=zeta).status_code == 404
    boss = api.with_key("root", Scope.OPERATE)
    rotated = api.client.post(f"/tenants/acme/keys/{key_id}/rotate", json={"overlap_s": 0}, headers=boss)
    assert (rotated.status_code, rotated.json["scopes"], rotated.json["created_by"]) == (201, ["read"], "root")
    assert api.client.get("/queue/jobs", headers=acme).status_code == 401


@KEYED
def test_a_tenant_manages_only_its_own_dead_jobs(api: Api, settings: dict[str, str]) -> None:
    api.client.put("/admin/model-configs/zimg", json={}, headers=api.with_key("root", Scope.OPERATE))
    own, foreign = (an_ended_job(api.dispatcher.store, State.DEAD, tenant=name) for name in ("acme", "zeta"))
    acme = api.with_key("acme", Scope.MANAGE)
    assert [job["job_id"] for job in api.client.get("/admin/dlq", headers=acme).json["jobs"]] == [own.id]
    assert api.client.post(f"/admin/dlq/{foreign.id}/retry", headers=acme).status_code == 404
    assert api.client.delete(f"/admin/dlq/{foreign.id}", headers=acme).status_code == 404
    assert api.client.post("/admin/dlq/retry-all", headers=acme).json["retried"] == 1
    assert (api.job(own.id).state, api.job(foreign.id).state) == (State.QUEUED, State.DEAD)


@KEYED
def test_a_tenant_reads_and_rotates_only_its_own_webhook_secret(api: Api, settings: dict[str, str]) -> None:
    acme = api.with_key("acme", Scope.MANAGE)
    for tenant, status in (("acme", 200), ("me", 200), ("zeta", 404)):
        assert api.client.get(f"/admin/webhook-secrets/{tenant}", headers=acme).status_code == status
        assert api.client.post(f"/admin/webhook-secrets/{tenant}", headers=acme).status_code == status


@KEYED
def test_a_tenant_sees_and_cancels_only_its_own_jobs(api: Api, settings: dict[str, str]) -> None:
    boss, acme, zeta = api.tenant("boss", admin=True), api.tenant("acme"), api.tenant("zeta")
    api.client.put("/admin/model-configs/zimg", json={}, headers=boss)
    job_id = api.submitted(acme)
    assert api.job(job_id).tenant == "acme"
    for act, path in ((api.client.get, ""), (api.client.get, "/attempts"), (api.client.get, "/explain")):
        assert act(f"/queue/jobs/{job_id}{path}", headers=zeta).status_code == 404
        assert act(f"/queue/jobs/{job_id}{path}", headers=acme).status_code == 200
    assert api.client.post(f"/queue/jobs/{job_id}/cancel", headers=zeta).status_code == 404
    assert api.client.get("/queue/jobs", headers=zeta).json["jobs"] == []
    for header in (acme, boss):
        assert [job["job_id"] for job in api.client.get("/queue/jobs", headers=header).json["jobs"]] == [job_id]
        assert api.client.get(f"/queue/jobs/{job_id}", headers=header).status_code == 200
    assert api.client.post(f"/queue/jobs/{job_id}/cancel", headers=acme).status_code == 200


@KEYED
def test_a_request_for_another_tenants_job_gets_the_same_response_as_for_an_unknown_job(
    api: Api, settings: dict[str, str]
) -> None:
    job, zeta = an_ended_job(api.dispatcher.store, tenant="acme"), api.tenant("zeta")
    real = api.client.get(f"/queue/jobs/{job.id}", headers=zeta).json
    none = api.client.get("/queue/jobs/none", headers=zeta).json
    hidden = {"instance": "", "job_id": ""}
    real["detail"] = real["detail"].replace(job.id, "none")
    assert real | hidden == none | hidden


@KEYED
def test_a_removed_key_stops_working(api: Api, settings: dict[str, str]) -> None:
    acme = api.tenant("acme")
    assert api.client.get("/queue/jobs", headers=acme).status_code == 200
    Tenants(api.database).remove("acme")
    assert api.client.get("/queue/jobs", headers=acme).status_code == 401


@KEYED
def test_a_key_works_from_anywhere_under_any_name(api: Api, settings: dict[str, str]) -> None:
    acme = api.tenant("acme") | {"Host": "api.example.com", "Origin": "https://app.example.com"}
    answer = api.client.get("/queue/jobs", headers=acme, environ_base={"REMOTE_ADDR": "203.0.113.7"})
    assert answer.status_code == 200


@KEYED
def test_a_valid_key_gets_503_and_not_401_while_the_database_is_down(api: Api, settings: dict[str, str]) -> None:
    acme = api.tenant("acme")
    api.take_database_away()
    answer = api.client.get("/queue/jobs", headers=acme)
    api.bring_database_back()
    assert answer.status_code == 503


# -- without keys: this machine only ---------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "127.0.0.9"])
def test_a_request_to_a_loopback_host_is_accepted(api: Api, host: str) -> None:
    assert api.client.get("/queue/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "[::2]", "10.0.0.1"],
)
@pytest.mark.parametrize("method, path", OF_KEYS)
def test_a_name_that_was_bound_to_this_machine_is_refused(api: Api, host: str, method: str, path: str) -> None:
    answer = _ask(api, method, path, headers={"Host": host})
    assert (answer.status_code, answer.json["code"]) == (421, "wrong_host")


@pytest.mark.parametrize("address", ["203.0.113.7", "10.0.0.1", "::2", "fe80::1%eth0"])
def test_other_machines_are_refused(api: Api, address: str) -> None:
    answer = api.client.get("/queue/jobs", environ_base={"REMOTE_ADDR": address})
    assert (answer.status_code, answer.json["code"]) == (403, "not_local")


@pytest.mark.parametrize(
    "header",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:3000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_another_sites_page_cannot_change_anything(api: Api, header: dict[str, str]) -> None:
    host = {"Host": "127.0.0.1:8000"}
    job = an_ended_job(api.dispatcher.store)
    for path in (f"/queue/jobs/{job.id}/cancel", "/admin/dlq/retry-all"):
        answer = api.client.post(path, headers=header | host)
        assert (answer.status_code, answer.json["code"]) == (403, "cross_origin")


def test_our_own_page_can(api: Api) -> None:
    header = {"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"}
    assert api.client.post("/admin/dlq/retry-all", headers=header).status_code == 200


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"])
def test_a_content_type_that_an_html_form_can_send_is_refused(api: Api, kind: str) -> None:
    answer = api.client.post("/admin/dlq/retry-all", data=b"", content_type=kind)
    assert (answer.status_code, answer.json["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("settings", [{"PUBLIC_URL": "https://jobs.example:8443"}])
def test_a_request_to_the_host_of_public_url_is_accepted(api: Api, settings: dict[str, str]) -> None:
    assert api.client.get("/queue/jobs", headers={"Host": "jobs.example"}).status_code == 200
    assert api.client.get("/queue/jobs", headers={"Host": "other.example"}).status_code == 421


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "", "gpu-box"])
def test_the_network_is_not_served_without_keys(api: Api, host: str) -> None:
    with pytest.raises(InvalidSetting, match="SLOTKEEPER_REQUIRE_KEYS"):
        create_app(AppSettings(host=host))
    create_app(AppSettings(host=host, require_keys=True))
