"""The secret that signs webhooks: administrators show and rotate it, and processes compare it."""

import base64
from datetime import UTC, datetime
from threading import Thread
from typing import Any

import pytest
from pytest_httpserver import HTTPServer
from standardwebhooks import Webhook, WebhookVerificationError
from structlog.testing import capture_logs

from routing.dispatch.outcome import Outcome, OutcomeKind
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.tenants import Tenants
from tasks import server_push, startup
from tasks.security import keyring
from tasks.webhooks import delivery_loop
from tests.support.api import Api
from tools.cluster.stack import eventually

ALLOWED = pytest.mark.parametrize("settings", [{"WEBHOOK_ALLOW": "127.0.0.1/32"}])
KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])
OTHER = base64.b64encode(bytes(range(100, 132))).decode()


def _secret(api: Api, tenant: str = "default", **more: Any) -> Any:
    return api.client.get(f"/admin/webhook-secrets/{tenant}", **more)


def _rotate(api: Api, tenant: str = "default", **more: Any) -> Any:
    return api.client.post(f"/admin/webhook-secrets/{tenant}", **more)


def _message(api: Api, httpserver: HTTPServer) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of the webhook that a receiver got for an ended job."""
    httpserver.expect_request("/hook").respond_with_data("ok")
    task = api.started(callback_url=f"http://127.0.0.1:{httpserver.port}/hook")
    assert server_push.apply_push(api.job(task.run.job.id), Outcome(OutcomeKind.DONE, result={"n": 1}))
    deliveries = delivery_loop.make_delivery_loop(api.database)
    sending = Thread(target=deliveries.run)
    sending.start()
    arrived = eventually(
        lambda: [request for request, _ in httpserver.log if request.path == "/hook"], "the message arrives"
    )
    deliveries.stop()
    sending.join()
    request = arrived[-1]
    return request.get_data(), dict(request.headers)


@ALLOWED
def test_a_webhook_is_verified_by_its_tenants_secret_and_by_no_other(api: Api, httpserver: HTTPServer) -> None:
    api.register()
    body, headers = _message(api, httpserver)
    (secret,) = _secret(api).json["secrets"]
    Webhook(secret).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(_secret(api, "acme").json["secrets"][0]).verify(body, headers)


@ALLOWED
def test_after_a_rotation_both_secrets_verify(api: Api, httpserver: HTTPServer) -> None:
    api.register()
    (before,) = _secret(api).json["secrets"]
    rotated = _rotate(api).json
    assert rotated["rotation"] == 1
    assert datetime.fromisoformat(rotated["former_until"]) > datetime.now(UTC)
    body, headers = _message(api, httpserver)
    assert rotated["secrets"][1:] == [before]
    for secret in rotated["secrets"]:
        Webhook(secret).verify(body, headers)


def test_a_second_rotation_ends_the_secret_before_the_last_at_once(api: Api) -> None:
    first = _secret(api).json["secrets"]
    second = _rotate(api).json["secrets"][0]
    third = _rotate(api).json["secrets"]
    assert third[1:] == [second] and first[0] not in third
    assert _secret(api).json["secrets"] == third


def test_a_rotation_concerns_one_tenant(api: Api) -> None:
    before = _secret(api, "acme/eu").json
    _rotate(api, "acme")
    assert _secret(api, "acme/eu").json == before


@KEYED
def test_only_a_key_with_the_manage_scope_reads_or_rotates_a_webhook_secret(api: Api) -> None:
    plain, admin = api.with_key("acme", Scope.READ, Scope.SUBMIT), api.tenant("root", admin=True)
    assert [ask(api, "acme", headers=plain).status_code for ask in (_secret, _rotate)] == [403, 403]
    assert [ask(api, "acme").status_code for ask in (_secret, _rotate)] == [401, 401]
    answer = _secret(api, "acme", headers=admin)
    assert (answer.status_code, answer.headers["Cache-Control"]) == (200, "no-store")


def test_a_tenant_of_the_same_name_does_not_inherit_the_secret(api: Api) -> None:
    api.tenant("acme")
    before = _secret(api, "acme").json["secrets"]
    Tenants(api.database).remove("acme")
    api.tenant("acme")
    assert not set(before) & set(_secret(api, "acme").json["secrets"])


def test_a_secret_is_that_of_no_unprintable_tenant(api: Api) -> None:
    assert _secret(api, "a%1Bb").status_code == 422


# -- several processes ---------------------------------------------------------------------------------------------


def _begin(monkeypatch: pytest.MonkeyPatch, secret: str, former: str = "") -> tuple[bool, list[Any]]:
    """What a process with this secret finds at its start, and its loud words."""
    monkeypatch.setenv("SLOTKEEPER_SECRET", secret)
    monkeypatch.setenv("SLOTKEEPER_FORMER_SECRET", former)
    keyring.installation_secrets.cache_clear()
    with capture_logs() as lines:
        shared = startup.check_secret()
    return shared, [line for line in lines if line["log_level"] == "error"]


def test_a_process_with_another_secret_logs_that_at_its_start(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = base64.b64encode(bytes(range(32))).decode()
    api.valkey.flush()
    assert _begin(monkeypatch, mine) == (True, [])
    assert _begin(monkeypatch, mine) == (True, [])
    shared, (line,) = _begin(monkeypatch, OTHER)
    assert not shared and "SLOTKEEPER_SECRET" in line["advice"]
    assert OTHER not in str(line) and mine not in str(line)
    assert _begin(monkeypatch, mine) == (True, []), "the other process does not replace the shared secret"


def test_a_new_secret_that_names_the_former_one_replaces_the_former(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = base64.b64encode(bytes(range(32))).decode()
    api.valkey.flush()
    _begin(monkeypatch, mine)
    assert _begin(monkeypatch, OTHER, former=mine)[0]
    assert _begin(monkeypatch, OTHER)[0]
    assert not _begin(monkeypatch, mine)[0]
