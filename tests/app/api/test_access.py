"""Who may come in, and what happens to everybody else."""

from typing import Any

import pytest

from app.config import AppSettings
from app.factory import create_app
from slotkeeper.errors import InvalidSetting
from slotkeeper.registry.tenants import Tenants
from tests.support.api import Api
from tests.support.builders import an_ended_job

KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "KEY_CACHE_S": "0"}])
OPEN = [("get", "/health/live"), ("get", "/health/ready"), ("get", "/openapi.json"), ("get", "/docs/swagger")]
OF_TENANTS = [
    ("post", "/queue/submit"),
    ("post", "/queue/submit-batch"),
    ("get", "/queue/jobs"),
    ("get", "/queue/jobs/x"),
    ("get", "/queue/jobs/x/attempts"),
    ("get", "/queue/jobs/x/explain"),
    ("post", "/queue/jobs/x/cancel"),
    ("get", "/metrics"),
]
OF_ADMINS = [
    ("post", "/admin/register"),
    ("post", "/admin/servers/probe"),
    ("get", "/admin/servers/gpu1/check"),
    ("get", "/admin/presets"),
    ("get", "/admin/servers"),
    ("patch", "/admin/servers/x"),
    ("delete", "/admin/servers/x"),
    ("post", "/admin/servers/x/reset"),
    ("get", "/admin/models"),
    ("get", "/admin/models/x"),
    ("patch", "/admin/models/x"),
    ("get", "/admin/tenants"),
    ("patch", "/admin/tenants/x"),
    ("get", "/admin/model-configs/x"),
    ("put", "/admin/model-configs/x"),
    ("delete", "/admin/model-configs/x"),
    ("get", "/admin/dlq"),
    ("post", "/admin/dlq/x/retry"),
    ("post", "/admin/dlq/retry-all"),
    ("delete", "/admin/dlq/x"),
    ("get", "/admin/ledger"),
    ("get", "/admin/processes"),
]


def _ask(api: Api, method: str, path: str, **more: Any) -> Any:
    body = {"json": {}} if method in ("post", "put", "patch") else {}
    return getattr(api.client, method)(path, **body, **more)


# -- keys ------------------------------------------------------------------------------------------------------


@KEYED
@pytest.mark.parametrize(
    "header", [{}, {"Authorization": "Bearer sk_wrong"}, {"Authorization": "Basic eDp5"}, {"Authorization": "Bearer"}]
)
@pytest.mark.parametrize("method, path", OF_TENANTS + OF_ADMINS)
def test_without_a_valid_key_nobody_comes_in(
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
@pytest.mark.parametrize("method, path", OF_ADMINS)
def test_only_administrators_administer(api: Api, settings: dict[str, str], method: str, path: str) -> None:
    answer = _ask(api, method, path, headers=api.tenant("acme"))
    assert (answer.status_code, answer.json["code"]) == (403, "forbidden")
    assert _ask(api, method, path, headers=api.tenant("boss", admin=True)).status_code not in (401, 403)


@KEYED
def test_a_tenant_sees_and_cancels_its_own_jobs_only(api: Api, settings: dict[str, str]) -> None:
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
def test_another_tenants_job_looks_like_none(api: Api, settings: dict[str, str]) -> None:
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
def test_without_the_database_nobody_is_taken_for_a_stranger(api: Api, settings: dict[str, str]) -> None:
    acme = api.tenant("acme")
    api.take_database_away()
    answer = api.client.get("/queue/jobs", headers=acme)
    api.bring_database_back()
    assert answer.status_code == 503


# -- without keys: this machine only ---------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "127.0.0.9"])
def test_this_machine_may_come_in_under_its_own_names(api: Api, host: str) -> None:
    assert api.client.get("/queue/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "[::2]", "10.0.0.1"],
)
@pytest.mark.parametrize("method, path", OF_TENANTS + OF_ADMINS)
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
def test_what_a_form_can_send_is_refused(api: Api, kind: str) -> None:
    answer = api.client.post("/admin/dlq/retry-all", data=b"", content_type=kind)
    assert (answer.status_code, answer.json["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("settings", [{"PUBLIC_URL": "https://jobs.example:8443"}])
def test_the_name_in_the_settings_is_ours_too(api: Api, settings: dict[str, str]) -> None:
    assert api.client.get("/queue/jobs", headers={"Host": "jobs.example"}).status_code == 200
    assert api.client.get("/queue/jobs", headers={"Host": "other.example"}).status_code == 421


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "", "gpu-box"])
def test_the_network_is_not_served_without_keys(api: Api, host: str) -> None:
    with pytest.raises(InvalidSetting, match="SLOTKEEPER_REQUIRE_KEYS"):
        create_app(AppSettings(host=host))
    create_app(AppSettings(host=host, require_keys=True))
