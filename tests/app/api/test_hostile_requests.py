"""Requests that the API refuses, and data that it does not show, with any key."""

import pytest

from app.config import AppSettings
from slotkeeper.clock import now_ms
from slotkeeper.errors import Conflict, InvalidRequest, InvalidSetting
from slotkeeper.registry.identity import Tenant
from slotkeeper.registry.tenants import Tenants
from tests.support.api import Api

KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true"}])
FORWARDED = [
    "CF-Connecting-IP",
    "X-Cluster-Client-IP",
    "X-Original-Forwarded-For",
    "CDN-Loop",
    "Fastly-Client-IP",
    "Fly-Client-IP",
    "True-Client-IP",
    "X-Azure-ClientIP",
    "X-Envoy-External-Address",
    "Forwarded",
    "Via",
    "X-Forwarded-For",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "X-Real-IP",
]
PAGES = ["/docs", "/docs/swagger", "/openapi.json", "/health/live", "/health/ready"]


# -- without keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", FORWARDED)
def test_without_keys_what_a_proxy_passes_on_is_refused_with_the_remedy(api: Api, header: str) -> None:
    answer = api.client.get("/admin/models", headers={header: "203.0.113.7"})
    assert (answer.status_code, answer.json["code"]) == (403, "forwarded")
    assert "SLOTKEEPER_REQUIRE_KEYS" in answer.json["detail"]
    assert "SLOTKEEPER_TRUSTED_PROXIES" in answer.json["detail"]


@pytest.mark.parametrize("settings", [{"TRUSTED_PROXIES": "10.0.0.0/8, 127.0.0.1"}])
def test_a_proxy_that_is_named_is_served(api: Api, settings: dict[str, str]) -> None:
    assert api.client.get("/admin/models", headers={"Via": "1.1 mine"}).status_code == 200


@pytest.mark.parametrize("settings", [{"TRUSTED_PROXIES": "10.0.0.0/8"}])
def test_another_proxy_is_not(api: Api, settings: dict[str, str]) -> None:
    assert api.client.get("/admin/models", headers={"Via": "1.1 mine"}).status_code == 403


@KEYED
def test_with_keys_required_a_request_through_a_proxy_is_accepted(api: Api, settings: dict[str, str]) -> None:
    header = api.tenant("acme") | {"X-Forwarded-For": "203.0.113.7"}
    assert api.client.get("/queue/jobs", headers=header).status_code == 200


def test_a_setting_that_names_no_proxy_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidSetting, match="SLOTKEEPER_TRUSTED_PROXIES"):
        AppSettings(trusted_proxies="nginx").check_exposure()


@pytest.mark.parametrize("page", PAGES)
def test_without_keys_pages_are_shown_under_this_machines_names_only(api: Api, page: str) -> None:
    assert api.client.get(page, headers={"Host": "evil.example"}).status_code == 421
    assert api.client.get(page).status_code in (200, 302)


# -- what is shown -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["/docs/swagger", "/openapi.json", "/queue/jobs", "/nothing"])
def test_responses_forbid_framing_and_content_sniffing(api: Api, page: str) -> None:
    headers = api.client.get(page).headers
    assert headers["X-Frame-Options"] == "DENY"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


@KEYED
def test_figures_of_all_models_are_for_administrators(api: Api, settings: dict[str, str]) -> None:
    assert api.client.get("/metrics", headers=api.tenant("acme")).status_code == 403
    assert api.client.get("/metrics", headers=api.tenant("boss", admin=True)).status_code == 200


def test_a_key_in_an_endpoints_query_is_not_shown(api: Api) -> None:
    endpoint = "http://gpu1:9001/generate?token=s3cret&v=2"
    shown = [api.register(endpoint=endpoint).text, api.client.get("/admin/servers").text]
    assert not any("s3cret" in text for text in shown)
    assert all("http://gpu1:9001/generate?token=***" in text for text in shown)
    assert api.dispatcher.catalog.refresh().servers["gpu1"].endpoints["zimg"] == endpoint


# -- what is taken -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [5e-324, 1e-9, 0.0009])
def test_a_weight_that_no_score_can_be_divided_by_is_refused(api: Api, weight: float) -> None:
    answer = api.register(weight=weight)
    assert (answer.status_code, answer.json["field"]) == (422, "weight")


@pytest.mark.parametrize("name", ["", " ", " a", "a\n", "\t", "a\u202eb", "\x1b[2J", "x" * 201])
def test_a_tenant_name_that_cannot_be_displayed_or_requested_is_refused(api: Api, name: str) -> None:
    with pytest.raises(InvalidRequest):
        Tenants(api.database).add(Tenant(name), now_ms())


def test_the_tenant_of_those_without_keys_gets_no_key(api: Api) -> None:
    with pytest.raises(Conflict):
        Tenants(api.database).add(Tenant("default"), now_ms())


def test_a_ttl_that_ends_before_not_before_is_refused_and_a_past_not_before_is_accepted(api: Api) -> None:
    api.model()
    assert api.submit(ttl=0, not_before="2020-01-01T00:00:00Z").status_code == 202
    refused = api.submit(ttl=1, not_before=2)
    assert (refused.status_code, refused.json["field"]) == (422, "ttl")


def test_a_fixed_path_segment_is_not_read_as_a_job_id(api: Api) -> None:
    assert api.client.delete("/admin/dlq/retry-all").status_code == 405
    assert set(api.client.options("/admin/dlq/retry-all").headers["Allow"].split(", ")) == {"POST", "OPTIONS"}
    assert api.client.delete("/admin/dlq/retry-all2").status_code == 404
