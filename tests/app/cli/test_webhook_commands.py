"""The webhook commands, against the API."""

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pytest_httpserver import HTTPServer
from werkzeug import Response

from app.cli import webhook_commands as commands
from app.cli.__main__ import main
from slotkeeper.clock import now_ms
from slotkeeper.outbox.subscriptions import Subscription, Subscriptions, new_id
from tasks.webhooks import delivery_loop
from tests.support.api import Api
from tests.support.builders import an_ended_job
from tests.support.callbacks import claim, due_ids, failed
from tests.support.direct_client import DirectClient
from tools.cluster.stack import eventually

URL = "https://hooks.example.com/slotkeeper"


@pytest.fixture
def run(api: Api, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(commands, "api_client", lambda: DirectClient(api))

    def command(*words: str, status: int = 0) -> Result:
        done = CliRunner().invoke(main, ["webhooks", *words])
        assert done.exit_code == status, (done.output, done.exception)
        return done

    return command


def _added(run: Any, *words: str) -> str:
    return str(json.loads(run("add", *words, "--json").stdout)["webhook"])


def test_a_webhook_is_added_shown_changed_disabled_enabled_and_removed(run: Any) -> None:
    added = run("add", URL, "--event", "job.dlq", "--template", '{"text": "{{status}}"}', "--description", "pager")
    assert "whsec_" in added.stdout and "cannot be read again" in added.stderr
    webhook = added.stdout.split()[0]
    assert webhook in run("list").stdout and URL in run("show", webhook).stdout
    run("change", webhook, "--event", "job.started", "--no-template")
    shown = json.loads(run("show", webhook, "--json").stdout)
    assert (shown["events"], shown["template"], shown["description"]) == (["job.started"], None, "pager")
    run("disable", webhook, "--reason", "moving house")
    assert "disabled: moving house" in run("list").stdout
    run("enable", webhook)
    run("remove", webhook)
    assert "There are no webhooks." in run("list").stdout


def test_the_list_command_reads_all_pages_of_webhooks(run: Any, api: Api) -> None:
    subscriptions, types = Subscriptions(api.database), frozenset({"job.canceled"})
    for n in range(201):
        subscriptions.add(Subscription(new_id(), "default", f"{URL}/{n}", types, "sealed", now_ms()), 1000)
    assert len(json.loads(run("list", "--json").stdout)["webhooks"]) == 201


def test_a_rotation_shows_the_new_secret_of_a_webhook_or_of_a_tenants_callbacks(run: Any) -> None:
    webhook = _added(run, URL)
    assert "whsec_" in run("rotate", webhook).stdout
    callbacks = run("rotate", "--tenant", "acme").stdout
    assert callbacks.strip() == run("secret", "--tenant", "acme").stdout.strip()
    run("rotate", webhook, "--tenant", "acme", status=2)


def test_a_replay_requires_exactly_one_selection(run: Any) -> None:
    webhook = _added(run, URL)
    run("replay", webhook, "--since", "2026-01-01T00:00:00Z")
    assert "0 messages" in run("replay", webhook, "--given-up").stdout
    run("replay", webhook, status=2)
    run("replay", webhook, "--given-up", "--since", "2026-01-01T00:00:00Z", status=2)
    assert "There are no such messages." in run("deliveries", webhook, "--given-up").stdout


def test_a_pace_is_set_and_taken_away(run: Any) -> None:
    webhook = _added(run, URL, "--max-per-s", "2.5")
    assert json.loads(run("show", webhook, "--json").stdout)["max_per_s"] == 2.5
    run("change", webhook, "--no-pace")
    assert json.loads(run("show", webhook, "--json").stdout)["max_per_s"] is None
    run("change", webhook, "--max-per-s", "2", "--no-pace", status=2)


def test_given_up_callbacks_are_listed_and_sent_again(api: Api, run: Any) -> None:
    job = an_ended_job(api.dispatcher.store, now_ms=now_ms(), callback_url=URL)
    (message_id,) = due_ids(api.database, now_ms())
    message = claim(api.database, message_id, now_ms(), now_ms() + 1000)
    assert message is not None and message.job_id == job.id
    failed(api.database, message, now_ms(), None, 404, "It answered 404.")
    assert "It answered 404." in run("deliveries", "--job", job.id).stdout
    listed = json.loads(run("deliveries", "--given-up", "--tenant", "default", "--json").stdout)
    assert [callback["message"] for callback in listed] == [message_id]
    assert "There are no such messages." in run("deliveries", "--given-up", "--tenant", "acme").stdout
    assert run("replay", "--message", message_id).stdout.strip().endswith("1.")
    assert "There are no such messages." in run("deliveries", "--given-up").stdout
    assert run("replay", "--given-up").stdout.strip().endswith("0.")
    run("deliveries", status=2)
    run("deliveries", "--job", job.id, "--given-up", status=2)
    run("replay", _added(run, URL), "--given-up", "--tenant", "acme", status=2)


@pytest.mark.parametrize("settings", [{"WEBHOOK_ALLOW": "127.0.0.1/32"}])
@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (500, 1)])
def test_the_test_command_prints_the_response_of_the_receiver(
    api: Api,
    run: Any,
    httpserver: HTTPServer,
    settings: dict[str, str],
    status: int,
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    httpserver.expect_request("/in").respond_with_handler(lambda _: Response("hello \x1b[31m", status))
    webhook = _added(run, f"http://127.0.0.1:{httpserver.port}/in")
    sending = delivery_loop.make_delivery_loop(api.database)

    def turn(_: float) -> None:
        sending._find_at = 0.0
        sending.run_once()
        eventually(lambda: not sending.running, "its tries end")

    monkeypatch.setattr(commands.time, "sleep", turn)
    done = run("test", webhook, status=exit_code)
    assert str(status) in done.stdout and "\x1b" not in done.stdout
    assert "webhook.test" in run("deliveries", webhook).stdout
