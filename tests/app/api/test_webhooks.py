"""Webhooks of tenants over the REST API: access rights, API responses, and the messages that receivers get."""

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pytest_httpserver import HTTPServer
from sqlalchemy import select, update
from standardwebhooks import Webhook, WebhookVerificationError
from werkzeug import Request, Response

from routing.dispatch.outcome import Outcome, OutcomeKind
from slotkeeper.clock import now_ms
from slotkeeper.jobs.notifications import parse_message_id
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.tables import messages
from slotkeeper.jobs.values import NewJob, new_job_id
from slotkeeper.outbox.subscriptions import delete_of_tenant
from slotkeeper.outbox.tables import receivers as table
from slotkeeper.registry.tenants import Tenants
from tasks import maintenance, server_push
from tasks.security import keyring, vault
from tasks.webhooks import delivery_loop
from tests.support.api import Api
from tests.support.callbacks import claim, due_ids, failed
from tests.support.ends import store_end
from tools.cluster.direct_starts import store_start
from tools.cluster.stack import eventually

ALLOWED = pytest.mark.parametrize("settings", [{"WEBHOOK_ALLOW": "127.0.0.1/32"}])
KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])
URL = "https://hooks.example.com/slotkeeper"


def add(api: Api, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    answer = api.client.post("/webhooks", json={"url": URL} | fields, headers=headers)
    assert answer.status_code == 201, answer.text
    return answer.json


def refused(api: Api, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, str]:
    answer = api.client.post("/webhooks", json={"url": URL} | fields, headers=headers)
    return answer.status_code, answer.json["detail"]


def show(api: Api, webhook: str, what: str = "", **more: Any) -> Any:
    slash = "/" if webhook and not webhook.startswith("?") else ""
    answer = api.client.get(f"/webhooks{slash}{webhook}{what}", **more)
    assert answer.status_code == 200, answer.text
    return answer.json


def do(api: Api, webhook: str, act: str, body: Any = None, **more: Any) -> Any:
    return api.client.post(f"/webhooks/{webhook}/{act}", json=body, **more)


def an_end(api: Api, tenant: str = "default", **fields: Any) -> str:
    """A job that has been canceled."""

    job = new_job_id()
    api.dispatcher.store.submit([NewJob(id=job, model="zimg", payload="{}", tenant=tenant, **fields)], now_ms())
    api.dispatcher.store.cancel_waiting(job, now_ms())
    return job


class Receiver:
    """Notes down what comes, and answers as the test says."""

    def __init__(self, server: HTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.port}/in"
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.status, self.answer = 200, "thank you"
        server.expect_request("/in").respond_with_handler(self._take)

    def _take(self, request: Request) -> Response:
        self.got.append((dict(request.headers), request.get_data()))
        return Response(self.answer, self.status)

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(body) for _, body in self.got]


@pytest.fixture
def receiver(httpserver: HTTPServer) -> Receiver:
    return Receiver(httpserver)


@pytest.fixture
def sending(api: Api) -> Iterator[delivery_loop.DeliveryLoop]:
    """What the process of webhooks does, one turn at a time."""
    yield delivery_loop.make_delivery_loop(api.database)


def _until(sending: delivery_loop.DeliveryLoop, condition: Any, what: str = "it is sent") -> None:
    def turn() -> bool:
        sending._find_at = 0.0
        sending.run_once()
        return bool(condition()) and not sending.running

    eventually(turn, what)


# -- who, and what -------------------------------------------------------------------------------------------------


def test_a_webhook_is_shown_as_it_was_added_and_its_secret_once(api: Api) -> None:
    answer = api.client.post("/webhooks", json={"url": URL, "events": ["job.dlq"], "description": "the pager"})
    added = answer.json
    assert answer.headers["Cache-Control"] == "no-store"
    assert added["secret"].startswith("whsec_") and len(base64.b64decode(added["secret"][6:])) == 32
    shown = show(api, added["webhook"])
    assert shown == {name: value for name, value in added.items() if name != "secret"}
    assert (shown["url"], shown["events"], shown["state"], shown["waiting"]) == (URL, ["job.dlq"], "enabled", 0)
    assert show(api, "") == {"webhooks": [shown], "next_cursor": None}


def test_a_webhook_without_events_gets_the_ends_of_jobs(api: Api) -> None:
    assert add(api)["events"] == ["job.canceled", "job.completed", "job.dlq", "job.expired", "job.failed"]


def test_the_database_holds_signing_secrets_only_encrypted(api: Api) -> None:
    secret = add(api)["secret"]
    with api.database.read() as connection:
        row = connection.execute(select(table)).one()
    assert secret.removeprefix("whsec_") not in str(row)
    assert vault.signing_secret(row.id, row.sealed) == secret
    assert vault.unseal("another", row.sealed) is None, "a row cannot be put in another's place"


def test_a_former_installation_secret_decrypts_signing_secrets_for_reencryption(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = add(api)
    second = do(api, added["webhook"], "rotate").json["secret"]
    former = keyring._encode_secret(keyring.installation_secrets()[0])
    monkeypatch.setenv("SLOTKEEPER_SECRET", base64.b64encode(bytes(range(50, 82))).decode())
    monkeypatch.setenv("SLOTKEEPER_FORMER_SECRET", former)
    keyring.installation_secrets.cache_clear()
    assert (maintenance.reseal_secrets(), maintenance.reseal_secrets()) == (1, 0)
    monkeypatch.delenv("SLOTKEEPER_FORMER_SECRET")
    keyring.installation_secrets.cache_clear()
    vault.unseal.cache_clear()
    with api.database.read() as connection:
        row = connection.execute(select(table)).one()
    assert vault.signing_secret(row.id, row.sealed) == second
    assert vault.signing_secret(row.id, row.former_sealed) == added["secret"]


@KEYED
def test_a_tenant_accesses_only_its_own_webhooks_and_an_administrator_all(api: Api) -> None:
    acme, other, root = api.tenant("acme"), api.tenant("other"), api.tenant("root", admin=True)
    webhook = add(api, acme)["webhook"]
    acts: list[tuple[str, str, Any]] = [
        ("GET", "", None),
        ("GET", "/deliveries", None),
        ("PATCH", "", {"url": "https://evil.example.com/"}),
        ("POST", "/test", None),
        ("POST", "/rotate", None),
        ("POST", "/disable", {}),
        ("POST", "/enable", None),
        ("POST", "/replay", {"given_up": True}),
        ("POST", "/replay", {"since": "2026-01-01T00:00:00Z"}),
        ("DELETE", "", None),
    ]
    for method, path, body in acts:
        answer = api.client.open(f"/webhooks/{webhook}{path}", method=method, json=body, headers=other)
        assert answer.status_code == 404, (method, path)
    assert api.client.get(f"/webhooks/given-up?webhook={webhook}", headers=other).status_code == 404
    assert show(api, "", headers=other)["webhooks"] == []
    assert show(api, "?tenant=acme", headers=other)["webhooks"] == []
    assert [shown["tenant"] for shown in show(api, "", headers=root)["webhooks"]] == ["acme"]
    assert show(api, "?tenant=other", headers=root)["webhooks"] == []
    assert refused(api, other, tenant="acme")[0] == 422
    assert add(api, root, tenant="other")["tenant"] == "other"
    for method, path, body in acts:
        answer = api.client.open(f"/webhooks/{webhook}{path}", method=method, json=body, headers=acme)
        assert answer.status_code < 300, (method, path, answer.text)


@KEYED
def test_a_tenant_of_the_same_name_does_not_inherit_webhooks(api: Api) -> None:
    add(api, api.tenant("acme"))
    Tenants(api.database).remove("acme", also=delete_of_tenant)
    assert show(api, "", headers=api.tenant("acme"))["webhooks"] == []


@pytest.mark.parametrize("settings", [{"WEBHOOK_MOST_RECEIVERS": "2"}])
def test_a_webhook_above_the_limit_is_refused_with_a_remedy(api: Api, settings: dict[str, str]) -> None:
    add(api), add(api)
    status, detail = refused(api)
    assert status == 409 and "remove one" in detail and "SLOTKEEPER_WEBHOOK_MOST_RECEIVERS" in detail


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/", "http://169.254.169.254/latest", "http://[::1]/", "http://10.1.2.3/", "http://0x7f.1/",
     "https://user:pass@hooks.example.com/", "https://hooks.example.com/a\r\nX-Evil: 1", "gopher://hooks.example.com/",
     "https://hooks.example.com:6379/", "https://hooks.example.com/" + "a" * 2048],
)  # fmt: skip
def test_an_address_inside_or_one_that_hides_something_is_refused_when_it_is_stored(api: Api, url: str) -> None:
    assert refused(api, url=url)[0] == 422
    webhook = add(api)["webhook"]
    assert api.client.patch(f"/webhooks/{webhook}", json={"url": url}).status_code == 422
    assert show(api, webhook)["url"] == URL


def test_a_change_changes_what_it_names(api: Api) -> None:
    webhook = add(api, template={"text": "{{status}}"}, description="one")["webhook"]
    patch = api.client.patch(f"/webhooks/{webhook}", json={"events": ["job.started"]})
    assert (patch.json["events"], patch.json["description"]) == (["job.started"], "one")
    assert patch.json["template"] == {"text": "{{status}}"}
    patch = api.client.patch(f"/webhooks/{webhook}", json={"template": None, "description": None})
    assert (patch.json["template"], patch.json["description"]) == (None, "")
    assert api.client.patch(f"/webhooks/{webhook}", json={"events": None}).status_code == 422
    assert api.client.patch(f"/webhooks/{webhook}", json={"secret": "whsec_x"}).status_code == 422


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "body"),
        ({"message": "msg_1_2", "given_up": True}, "body"),
        ({"message": "msg_x"}, "message"),
        ({"since": "yesterday"}, "since"),
        ({"since": "2026-01-01T00:00:00"}, "since"),
    ],
)
def test_an_invalid_replay_is_refused_and_names_the_field(api: Api, body: Any, named: str) -> None:
    answer = do(api, add(api)["webhook"], "replay", body)
    assert (answer.status_code, answer.json["field"]) == (422, named)


@pytest.mark.parametrize("cursor", ["x", "t0", "t1' OR 1=1", "we_1.1"])
def test_an_invalid_cursor_is_refused(api: Api, cursor: str) -> None:
    webhook = add(api)["webhook"]
    query = {"cursor": cursor}
    assert api.client.get(f"/webhooks/{webhook}/deliveries", query_string=query).status_code == 422
    assert api.client.get("/webhooks/given-up", query_string=query).status_code == 422


def test_an_unknown_webhook_or_message_is_not_found(api: Api) -> None:
    assert api.client.get("/webhooks/we_none").status_code == 404
    assert do(api, add(api)["webhook"], "replay", {"message": "msg_9999_1"}).status_code == 404


# -- what receivers get --------------------------------------------------------------------------------------------


@ALLOWED
def test_a_webhook_gets_a_signed_message_with_the_result_and_the_log_lists_the_delivery(
    api, receiver, sending, settings
) -> None:
    api.register()
    added = add(api, url=receiver.url, events=["job.started", "job.completed"])
    task = api.started()

    assert server_push.apply_push(api.job(task.run.job.id), Outcome(OutcomeKind.DONE, result={"n": 1}))
    _until(sending, lambda: len(receiver.got) == 2)
    assert [body["type"] for body in receiver.bodies] == ["job.started", "job.completed"]
    headers, body = receiver.got[1]
    Webhook(added["secret"]).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(added["secret"]).verify(body.replace(b"completed", b"failed"), headers)
    data = json.loads(body)["data"]
    assert (data["job_id"], data["status"], data["result"], data["error"]) == (
        task.run.job.id,
        "completed",
        {"n": 1},
        None,
    )
    assert "payload" not in data and "envelope" not in data
    log = show(api, added["webhook"], "/deliveries")["deliveries"]
    assert [(entry["event"], entry["outcome"], entry["status"], entry["answer"], entry["number"]) for entry in log] == [
        ("job.completed", "delivered", 200, "thank you", 1),
        ("job.started", "delivered", 200, "thank you", 1),
    ]
    assert log[0]["message"] == headers["Webhook-Id"]
    assert show(api, added["webhook"])["waiting"] == 0


@ALLOWED
def test_after_a_rotation_both_secrets_verify_and_after_two_the_first_does_not(
    api, receiver, sending, settings
) -> None:
    added = add(api, url=receiver.url)
    second = do(api, added["webhook"], "rotate").json
    assert datetime.fromisoformat(second["former_until"]) > datetime.now(UTC) + timedelta(hours=23)
    an_end(api)
    _until(sending, lambda: receiver.got)
    headers, body = receiver.got[0]
    for secret in (added["secret"], second["secret"]):
        Webhook(secret).verify(body, headers)
    third = do(api, added["webhook"], "rotate").json["secret"]
    an_end(api)
    _until(sending, lambda: len(receiver.got) == 2)
    headers, body = receiver.got[1]
    for secret in (second["secret"], third):
        Webhook(secret).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(added["secret"]).verify(body, headers)


@ALLOWED
def test_the_end_of_a_job_is_sent_to_its_tenants_webhooks_and_to_its_callback(
    api, receiver, httpserver, sending, settings
) -> None:
    own: list[bytes] = []
    httpserver.expect_request("/own").respond_with_handler(
        lambda request: own.append(request.get_data()) or Response("ok")
    )
    add(api, url=receiver.url)
    add(api, url=receiver.url, tenant="acme")
    job = an_end(api, callback_url=f"http://127.0.0.1:{httpserver.port}/own")
    _until(sending, lambda: own and receiver.got)
    assert json.loads(own[0])["status"] == "canceled" and json.loads(own[0])["job_id"] == job
    assert [body["data"]["tenant"] for body in receiver.bodies] == ["default"]


@ALLOWED
def test_a_template_defines_the_body_of_a_message(api, receiver, sending, settings) -> None:
    add(api, url=receiver.url, template={"text": "{{model}}: {{job_id}} is {{status}}", "n": 1})
    job = an_end(api)
    _until(sending, lambda: receiver.got)
    assert receiver.bodies == [{"text": f"zimg: {job} is canceled", "n": 1}]


@ALLOWED
def test_a_test_message_is_sent_at_once_and_its_outcome_is_in_the_delivery_log(
    api, receiver, sending, settings
) -> None:
    added = add(api, url=receiver.url)
    receiver.status, receiver.answer = 503, "x" * 10_000
    message = do(api, added["webhook"], "test").json["message"]
    _until(sending, lambda: receiver.got)
    (entry,) = show(api, added["webhook"], "/deliveries")["deliveries"]
    assert (entry["message"], entry["event"], entry["outcome"], entry["status"], entry["job_id"]) == (
        message,
        "webhook.test",
        "given_up",
        503,
        None,
    )
    assert len(entry["answer"]) == 256
    Webhook(added["secret"]).verify(receiver.got[0][1], receiver.got[0][0])
    assert show(api, "given-up")["messages"] == []


@ALLOWED
def test_410_disables_a_webhook_and_enabling_it_sends_all_pending_messages(api, receiver, sending, settings) -> None:
    webhook = add(api, url=receiver.url)["webhook"]
    receiver.status = 410
    first = an_end(api)
    _until(sending, lambda: show(api, webhook)["state"] == "disabled")
    shown = show(api, webhook)
    assert "410" in shown["reason"] and shown["changed_by"] is None
    assert do(api, webhook, "test").status_code == 409
    second = an_end(api)
    receiver.status = 200
    assert do(api, webhook, "enable").json["state"] == "enabled"
    with api.database.engine.begin() as connection:
        connection.execute(update(messages).values(next_ms=0))
    _until(sending, lambda: len(receiver.got) == 3)
    assert [body["data"]["job_id"] for body in receiver.bodies] == [first, first, second]


@ALLOWED
def test_given_up_messages_are_listed_and_sent_again_by_a_replay(api, receiver, sending, settings, monkeypatch) -> None:
    webhook = add(api, url=receiver.url)["webhook"]
    monkeypatch.setattr(sending._messages, "_keep_ms", 0)
    receiver.status = 500
    job = an_end(api)
    _until(sending, lambda: receiver.got)
    (given_up,) = show(api, "given-up")["messages"]
    assert (given_up["webhook"], given_up["job_id"], given_up["status"], given_up["tries"]) == (webhook, job, 500, 1)
    receiver.status = 200
    do(api, webhook, "enable")
    assert do(api, webhook, "replay", {"given_up": True}).json["given_up"] == 1
    _until(sending, lambda: len(receiver.got) == 2)
    assert receiver.got[0][0]["Webhook-Id"] == receiver.got[1][0]["Webhook-Id"] == given_up["message"]
    assert show(api, "given-up")["messages"] == []


@ALLOWED
def test_replay_sends_one_message_or_all_since_a_time_again(api, receiver, sending, settings) -> None:
    began = datetime.now(UTC).isoformat()
    webhook = add(api, url=receiver.url)["webhook"]
    jobs = [an_end(api) for _ in range(3)]
    _until(sending, lambda: len(receiver.got) == 3)
    one = receiver.got[1][0]["Webhook-Id"]
    assert do(api, webhook, "replay", {"message": one}).status_code == 202
    _until(sending, lambda: len(receiver.got) == 4)
    assert receiver.got[3][0]["Webhook-Id"] == one
    assert do(api, webhook, "replay", {"since": began}).status_code == 202
    _until(sending, lambda: len(receiver.got) == 7)
    assert sorted(body["data"]["job_id"] for body in receiver.bodies[4:]) == sorted(jobs)


@pytest.mark.parametrize(
    "settings", [{"WEBHOOK_ALLOW": "127.0.0.1/32", "REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}]
)
def test_the_response_of_an_internal_receiver_is_shown_only_to_administrators(api, receiver, sending, settings) -> None:
    acme, root = api.tenant("acme"), api.tenant("root", admin=True)
    receiver.answer = "the keys of the kingdom"
    webhook = add(api, acme, url=receiver.url)["webhook"]
    do(api, webhook, "test", headers=acme)
    _until(sending, lambda: receiver.got)
    seen = [show(api, webhook, "/deliveries", headers=who)["deliveries"][0]["answer"] for who in (acme, root)]
    assert seen == [None, "the keys of the kingdom"]


def test_a_webhook_whose_url_became_private_is_not_requested(api, receiver, sending) -> None:
    """The operator has since forbidden a network, or the name resolves to another address."""
    webhook = add(api)["webhook"]
    with api.database.engine.begin() as connection:
        connection.execute(update(table).values(url=receiver.url))
    do(api, webhook, "test")
    _until(sending, lambda: show(api, webhook, "/deliveries")["deliveries"])
    (entry,) = show(api, webhook, "/deliveries")["deliveries"]
    assert entry["status"] is None and "not public" in entry["error"] and receiver.got == []


@ALLOWED
def test_a_redirect_is_not_followed(api, receiver, httpserver, sending, settings) -> None:
    asked: list[str] = []
    httpserver.expect_request("/elsewhere").respond_with_handler(
        lambda request: asked.append(request.path) or Response("no")
    )
    httpserver.expect_request("/moved").respond_with_handler(
        lambda _: Response("", 307, {"Location": f"http://127.0.0.1:{httpserver.port}/elsewhere"})
    )
    webhook = add(api, url=receiver.url.replace("/in", "/moved"))["webhook"]
    do(api, webhook, "test")
    _until(sending, lambda: show(api, webhook, "/deliveries")["deliveries"])
    assert show(api, webhook, "/deliveries")["deliveries"][0]["status"] == 307 and asked == []


def test_a_dead_job_with_pending_webhook_messages_cannot_be_removed(api, sending) -> None:

    webhook, job = add(api)["webhook"], new_job_id()
    api.register()
    store = api.dispatcher.store
    store.submit([NewJob(id=job, model="zimg", payload="{}")], now_ms())
    run = store_start(store, job, "gpu1", "gpu1/0", "lease", now_ms())
    assert run is not None
    store_end(store, job, run.attempt, Reason.RETRIES_EXHAUSTED, now_ms())
    refused = api.client.delete(f"/admin/dlq/{job}")
    assert refused.status_code == 409 and webhook in refused.json["detail"]
    do(api, webhook, "disable", {})
    assert api.client.delete(f"/admin/dlq/{job}").status_code == 204


# -- pace ------------------------------------------------------------------------------------------------------------


def test_a_pace_is_set_changed_and_taken_away(api: Api) -> None:
    webhook = add(api, max_per_s=2.5)["webhook"]
    assert show(api, webhook)["max_per_s"] == 2.5
    for wanted in (100, None):
        assert api.client.patch(f"/webhooks/{webhook}", json={"max_per_s": wanted}).json["max_per_s"] == wanted
    api.client.patch(f"/webhooks/{webhook}", json={"max_per_s": 7, "description": "pager"})
    assert api.client.patch(f"/webhooks/{webhook}", json={"description": ""}).json["max_per_s"] == 7
    assert show(api, add(api)["webhook"])["max_per_s"] is None


@pytest.mark.parametrize("max_per_s", [0, -1, 0.09, 1001, "2", True, [1]])
def test_a_pace_that_is_none_is_refused(api: Api, max_per_s: Any) -> None:
    answer = api.client.post("/webhooks", json={"url": URL, "max_per_s": max_per_s})
    assert (answer.status_code, answer.json["field"]) == (422, "max_per_s")


def test_a_reason_is_kept_as_every_database_takes_it(api: Api) -> None:
    webhook = add(api)["webhook"]
    assert do(api, webhook, "disable", {"reason": "a NUL \0 and \u00fc"}).json["reason"] == "a NUL  and \u00fc"


# -- jobs' own callbacks ----------------------------------------------------------------------------------------------


def _given_up(api: Api, tenant: str = "default") -> str:
    """Give up the callback of a job and return the callback's webhook-id."""
    job = an_end(api, tenant, callback_url="https://client.example/hook")
    (message_id,) = due_ids(api.database, now_ms())
    message = claim(api.database, message_id, now_ms(), now_ms() + 1000)
    assert message is not None and message.job_id == job
    failed(api.database, message, now_ms(), None, 404, "It answered 404.")
    return message_id


def _callbacks(api: Api, query: str = "", **more: Any) -> list[str]:
    answer = api.client.get(f"/webhooks/callbacks/given-up{query}", **more)
    assert answer.status_code == 200, answer.text
    return [callback["message"] for callback in answer.json["callbacks"]]


@KEYED
def test_a_tenant_lists_and_replays_only_its_own_given_up_callbacks(api: Api, settings: dict[str, str]) -> None:
    own, other, root = api.tenant("acme"), api.tenant("other"), api.tenant("root", admin=True)
    given_up, foreign = _given_up(api, "acme"), _given_up(api, "other")
    (shown,) = api.client.get("/webhooks/callbacks/given-up?tenant=other", headers=own).json["callbacks"]
    assert (shown["message"], shown["tenant"], shown["status"], shown["last_status"]) == (
        given_up,
        "acme",
        "canceled",
        404,
    )
    assert shown["error"] == "It answered 404." and shown["given_up_at"] >= shown["ended_at"]
    assert _callbacks(api, headers=other) == [foreign]
    assert _callbacks(api, headers=root) == [foreign, given_up] and _callbacks(api, "?tenant=acme", headers=root) == [
        given_up
    ]

    def replay(headers: dict[str, str], **body: Any) -> Any:
        return api.client.post("/webhooks/callbacks/replay", json=body, headers=headers)

    assert replay(own, message=foreign).status_code == 404
    assert replay(own, message=given_up).json == {"message": given_up, "since": None, "sent": 1}
    assert replay(own, given_up=True, tenant="other").json["sent"] == 0, "only an administrator may name another tenant"
    assert replay(root, given_up=True, tenant="acme").json["sent"] == 0
    assert replay(root, since="2026-01-01T00:00:00Z").json["sent"] == 1
    assert _callbacks(api, headers=root) == []
    assert set(due_ids(api.database, now_ms())) == {given_up, foreign}


@KEYED
def test_the_deliveries_of_a_callback_are_shown_only_to_its_tenant(api: Api) -> None:
    own, other = api.tenant("acme"), api.tenant("other")
    job = parse_message_id(_given_up(api, "acme"))[0]
    path = f"/webhooks/callbacks/deliveries?job_id={job}"
    (tried,) = api.client.get(path, headers=own).json["deliveries"]
    assert (tried["job_id"], tried["event"], tried["outcome"], tried["status"]) == (
        *(job, "job.canceled", "given_up", 404),
    )
    assert api.client.get(path, headers=other).status_code == 404


@ALLOWED
def test_a_callback_is_tried_again_like_a_webhook_and_410_ends_that(api: Api, httpserver: HTTPServer) -> None:
    receiver, sending = Receiver(httpserver), delivery_loop.make_delivery_loop(api.database)
    receiver.status = 503
    job = an_end(api, callback_url=receiver.url)

    def tries() -> list[str]:
        sending.run_once()
        found = api.client.get(f"/webhooks/callbacks/deliveries?job_id={job}").json["deliveries"]
        return [delivery["outcome"] for delivery in found]

    eventually(lambda: tries() == ["failed"], "the callback is tried")
    with api.database.read() as connection:
        (row,) = connection.execute(select(messages)).all()
    assert row.state == "pending" and 3_000 < row.next_ms - now_ms() < 6_000
    receiver.status = 410
    api.database.write(lambda tx: tx.connection.execute(update(messages).values(next_ms=now_ms())))
    eventually(lambda: tries() == ["given_up", "failed"], "the callback is given up")
    receiver.status = 200
    (given_up,) = _callbacks(api)
    api.client.post("/webhooks/callbacks/replay", json={"message": given_up})
    eventually(lambda: tries() == ["delivered", "given_up", "failed"], "the callback is delivered")
    assert {headers["Webhook-Id"] for headers, _ in receiver.got} == {given_up}
    assert receiver.bodies[-1] == {
        "job_id": job,
        "model": "zimg",
        "status": "canceled",
        "attempts": 0,
        "result": None,
        "error": None,
    }


def test_given_up_callbacks_are_listed_in_pages(api: Api) -> None:
    ids = [_given_up(api) for _ in range(3)]
    first = api.client.get("/webhooks/callbacks/given-up?limit=2").json
    assert [callback["message"] for callback in first["callbacks"]] == ids[:0:-1]
    assert _callbacks(api, f"?limit=2&cursor={first['next_cursor']}") == ids[:1]
    assert api.client.get("/webhooks/callbacks/given-up?cursor=x").status_code == 422


@pytest.mark.parametrize(
    "body, status",
    [
        ({}, 422),
        ({"message": "x", "given_up": True}, 422),
        ({"since": "yesterday"}, 422),
        ({"given_up": True, "tenant": "a\0"}, 422),
        ({"message": "a\0"}, 404),
        ({"message": "msg_unknown"}, 404),
    ],
)
def test_a_replay_of_callbacks_requires_exactly_one_valid_selection(api: Api, body: Any, status: int) -> None:
    assert api.client.post("/webhooks/callbacks/replay", json=body).status_code == status
