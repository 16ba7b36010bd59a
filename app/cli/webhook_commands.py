"""Commands that manage webhooks and the secrets that sign their messages."""

import sys
import time
from typing import Any

import click

from app.cli.arguments import read_json
from app.cli.output import (
    age,
    api_client,
    json_option,
    limit_option,
    path_segment,
    print_fields,
    print_json,
    print_table,
)
from app.terminal import echo, escape_line

_TEST_TIME_LIMIT_S = 30.0

tenant_option = click.option("--tenant", default="default", show_default=True, help="The tenant of the jobs.")
_webhook = click.argument("webhook")
_webhook_or_callbacks = click.argument("webhook", required=False)
_events = click.option(
    "--event", "events", metavar="TYPE", multiple=True, help="Type of event to send; repeat it for several."
)
_template = click.option(
    "--template", metavar="JSON", help="Template of the body; @FILE reads a file, - standard input."
)
_NO_LIMIT = 1_000_000
_description = click.option("--description", help="A note for people.")
_max_per_s = click.option("--max-per-s", type=float, help="Messages per second.  [default: no limit]")


@click.group()
def webhooks() -> None:
    """Manage webhooks: URLs that receive events of jobs."""


@webhooks.command("list")
@click.option("--tenant", help="Only webhooks of this tenant; for operators.")
@json_option
def list_webhooks(tenant: str | None, as_json: bool) -> None:
    """List webhooks and their state."""
    listed = list(api_client().iter_pages("/webhooks", "webhooks", _NO_LIMIT, tenant=tenant))
    if as_json:
        print_json({"webhooks": listed})
        return
    rows = [
        (webhook["webhook"], webhook["tenant"], webhook["url"], _format_state(webhook), webhook["waiting"])
        for webhook in listed
    ]
    titles = ("webhook", "tenant", "URL", "state", "waiting")
    print_table(titles, rows, "There are no webhooks.  Add one with: slotkeeper webhooks add URL")


@webhooks.command("add")
@click.argument("url")
@_events
@_template
@_description
@_max_per_s
@click.option("--tenant", help="The tenant of the jobs; another tenant only for operators.")
@json_option
def add_webhook(
    url: str,
    events: tuple[str, ...],
    template: str | None,
    description: str | None,
    max_per_s: float | None,
    tenant: str | None,
    as_json: bool,
) -> None:
    """Send events of jobs to a URL.

    Without --event the URL receives the end of each job.

    \b
    slotkeeper webhooks add https://example.com/hook --event job.completed --event job.dlq
    slotkeeper webhooks add https://hooks.slack.com/services/... --template '{"text": "{{job_id}} is {{status}}"}'
    """
    body: dict[str, Any] = {"url": url}
    given = {"events": list(events) or None, "description": description, "max_per_s": max_per_s, "tenant": tenant}
    body |= {name: value for name, value in given.items() if value is not None}
    if template is not None:
        body["template"] = read_json(template, "--template")
    answer = api_client().post("/webhooks", body)
    if as_json:
        print_json(answer)
        return
    echo(escape_line(f"{answer['webhook']} sends these events to {answer['url']}: {', '.join(answer['events'])}."))
    _print_secret(answer["secret"])


@webhooks.command("show")
@_webhook
@json_option
def show_webhook(webhook: str, as_json: bool) -> None:
    """Show a webhook and its state."""
    answer = api_client().get(f"/webhooks/{path_segment(webhook)}")
    if as_json:
        print_json(answer)
    else:
        print_fields(answer)


@webhooks.command("change")
@_webhook
@click.option("--url", help="The new URL.")
@_events
@_template
@click.option("--no-template", is_flag=True, help="Use the default body again.")
@_description
@_max_per_s
@click.option("--no-pace", is_flag=True, help="Remove the limit of messages per second.")
def change_webhook(
    webhook: str,
    url: str | None,
    events: tuple[str, ...],
    template: str | None,
    no_template: bool,
    description: str | None,
    max_per_s: float | None,
    no_pace: bool,
) -> None:
    """Change the settings of a webhook; the others stay."""
    given = {"url": url, "events": list(events) or None, "description": description, "max_per_s": max_per_s}
    body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if template is not None or no_template:
        body["template"] = None if template is None else read_json(template, "--template")
    if no_pace and max_per_s is not None:
        raise click.UsageError("--max-per-s and --no-pace contradict each other; give one of them.")
    if no_pace:
        body["max_per_s"] = None
    if not body:
        raise click.UsageError("Nothing to change; give at least one option, such as --url.")
    api_client().request("PATCH", f"/webhooks/{path_segment(webhook)}", body=body)
    echo(escape_line(f"Webhook {webhook} is changed."))


@webhooks.command("test")
@_webhook
@json_option
def test_webhook(webhook: str, as_json: bool) -> None:
    """Send a test message and show the response.

    Exit status 1: the receiver did not accept the message.
    """
    api, path = api_client(), f"/webhooks/{path_segment(webhook)}"
    message = api.post(f"{path}/test")["message"]
    deadline_s = time.monotonic() + _TEST_TIME_LIMIT_S
    while (delivery := _find_delivery(api.get(f"{path}/deliveries", limit=50), message)) is None:
        if time.monotonic() > deadline_s:
            raise click.ClickException(
                f"The test was not sent within {_TEST_TIME_LIMIT_S:g} s; check that a webhooks process runs."
            )
        time.sleep(0.2)
    if as_json:
        print_json(delivery)
    else:
        body = f": {delivery['answer']}" if delivery["answer"] else ""
        result = f"The receiver answered {delivery['status']}{body}" if delivery["error"] is None else delivery["error"]
        echo(escape_line(f"{result} ({delivery['latency_ms']} ms)"))
    if delivery["outcome"] != "delivered":
        sys.exit(1)


@webhooks.command("rotate")
@_webhook_or_callbacks
@click.option("--tenant", help="Without WEBHOOK: the tenant.  [default: default]")
@json_option
def rotate_secret(webhook: str | None, tenant: str | None, as_json: bool) -> None:
    """Create a new secret for a webhook and print it.

    Without WEBHOOK: create a new secret for the callback URLs of a tenant's jobs.  For a day messages are signed with
    the previous secret as well.  If others know the secret, rotate twice.
    """
    if webhook is None:
        _request_secret("POST", tenant or "default", as_json)
        return
    _refuse_tenant(tenant)
    answer = api_client().post(f"/webhooks/{path_segment(webhook)}/rotate")
    if as_json:
        print_json(answer)
        return
    _print_secret(answer["secret"])
    echo(f"Until {answer['former_until']} messages are also signed with the previous secret.", err=True)


@webhooks.command("enable")
@_webhook
def enable_webhook(webhook: str) -> None:
    """Enable a webhook and send the events that it missed."""
    api_client().post(f"/webhooks/{path_segment(webhook)}/enable")
    echo(escape_line(f"Webhook {webhook} is enabled."))


@webhooks.command("disable")
@_webhook
@click.option("--reason", help="The reason, which is shown with the webhook.")
def disable_webhook(webhook: str, reason: str | None) -> None:
    """Disable a webhook; `enable` sends the missed events."""
    api_client().post(f"/webhooks/{path_segment(webhook)}/disable", {} if reason is None else {"reason": reason})
    echo(escape_line(f"Webhook {webhook} is disabled."))


@webhooks.command("remove")
@_webhook
def remove_webhook(webhook: str) -> None:
    """Remove a webhook and its pending messages."""
    api_client().request("DELETE", f"/webhooks/{path_segment(webhook)}")
    echo(escape_line(f"Webhook {webhook} is removed."))


@webhooks.command("deliveries")
@_webhook_or_callbacks
@click.option("--job", help="Instead of WEBHOOK: a job with a callback_url.")
@click.option("--given-up", is_flag=True, help="List the messages that were given up, instead of each try.")
@click.option("--tenant", help="Without WEBHOOK: only callbacks of this tenant; for operators.")
@limit_option
@json_option
def list_deliveries(
    webhook: str | None, job: str | None, given_up: bool, tenant: str | None, limit: int, as_json: bool
) -> None:
    """List the last tries of messages, the newest first.

    With --given-up and without WEBHOOK: list the messages to callback URLs of jobs that were given up.
    """
    if given_up and webhook is None and job is None:
        _list_callbacks(tenant, limit, as_json)
        return
    if (webhook is None) is (job is None) or (given_up and job):
        raise click.UsageError("Give a WEBHOOK, or --job, or --given-up.")
    _refuse_tenant(tenant)
    if given_up:
        name = "messages"
        listed = list(api_client().iter_pages("/webhooks/given-up", name, limit, webhook=webhook))
        rows: list[tuple[Any, ...]] = [
            (message["message"], message["event"], message["job_id"], message["tries"], message["error"])
            for message in listed
        ]
        titles: tuple[str, ...] = ("message", "event", "job", "tries", "error")
    else:
        path = "callbacks" if webhook is None else path_segment(webhook)
        name = "deliveries"
        listed = list(api_client().iter_pages(f"/webhooks/{path}/deliveries", name, limit, job_id=job))
        rows = [_delivery_row(delivery) for delivery in listed]
        titles = ("message", "event", "ago", "try", "outcome", "status", "ms", "response or error")
    if as_json:
        print_json({name: listed})
    else:
        print_table(titles, rows, "There are no such messages.")


def _delivery_row(delivery: dict[str, Any]) -> tuple[Any, ...]:
    return (
        delivery["message"],
        delivery["event"],
        age(delivery["at"]),
        delivery["number"],
        delivery["outcome"],
        delivery["status"],
        delivery["latency_ms"],
        delivery["error"] or delivery["answer"],
    )


@webhooks.command("replay")
@_webhook_or_callbacks
@click.option("--message", help="Send the message with this webhook-id.")
@click.option("--since", help="Send all events since this time (ISO 8601 with time zone).")
@click.option("--given-up", is_flag=True, help="Send all messages that were given up.")
@click.option("--tenant", help="Without WEBHOOK: only callbacks of this tenant; for operators.")
def replay_webhook(
    webhook: str | None, message: str | None, since: str | None, given_up: bool, tenant: str | None
) -> None:
    """Send messages once more, with the same webhook-ids.

    Without WEBHOOK: send messages to callback URLs of jobs once more.  With --since these are the messages that were
    given up, of jobs that ended since then.

    \b
    slotkeeper webhooks replay WEBHOOK --since 2026-11-22T20:00:00Z
    slotkeeper webhooks replay --given-up
    """
    given = {"message": message, "since": since, "given_up": given_up or None}
    body = {name: value for name, value in given.items() if value is not None}
    if len(body) != 1:
        raise click.UsageError("Give exactly one of --message, --since and --given-up.")
    if webhook is None:
        answer = api_client().post("/webhooks/callbacks/replay", body | ({} if tenant is None else {"tenant": tenant}))
        echo(f"Callbacks that will be sent once more: {answer['sent']}.")
        return
    _refuse_tenant(tenant)
    answer = api_client().post(f"/webhooks/{path_segment(webhook)}/replay", body)
    selection = message or (
        f"all events since {since}" if since else f"{answer['given_up']} messages that were given up"
    )
    echo(escape_line(f"Webhook {webhook} will be sent once more: {selection}."))


@webhooks.command("secret")
@tenant_option
@json_option
def show_secret(tenant: str, as_json: bool) -> None:
    """Print the secret that signs messages to callback URLs.

    The receiver of a job's callback_url verifies messages with it.  Each tenant has its secret, in the form of Standard
    Webhooks (whsec_...).  It gives no access to the API.
    """
    _request_secret("GET", tenant, as_json)


def _list_callbacks(tenant: str | None, limit: int, as_json: bool) -> None:
    listed = list(api_client().iter_pages("/webhooks/callbacks/given-up", "callbacks", limit, tenant=tenant))
    if as_json:
        print_json(listed)
        return
    rows = [
        (row["message"], row["tenant"], row["status"], age(row["ended_at"]), row["tries"], row["error"])
        for row in listed
    ]
    titles = ("message", "tenant", "job", "ended", "tries", "error")
    print_table(titles, rows, "There are no such messages.")


def _refuse_tenant(tenant: str | None) -> None:
    """Raise UsageError if --tenant was given together with a webhook."""
    if tenant is not None:
        raise click.UsageError("A webhook belongs to one tenant; leave --tenant out.")


def _request_secret(method: str, tenant: str, as_json: bool) -> None:
    """Print the secret for the callbacks of a tenant.  `method`: GET, or POST for a new secret."""
    answer = api_client().request(method, f"/admin/webhook-secrets/{path_segment(tenant)}")
    if as_json:
        print_json(answer)
        return
    echo(answer["secrets"][0])
    if answer["former_until"]:
        echo(f"Until {answer['former_until']} messages are also signed with the previous secret.", err=True)


def _print_secret(secret: str) -> None:
    echo(secret)
    echo("Save this secret now: it cannot be read again.  The receiver verifies messages with it.", err=True)


def _format_state(webhook: dict[str, Any]) -> str:
    if webhook["state"] == "disabled":
        return f"disabled: {webhook['reason']}" if webhook["reason"] else "disabled"
    if webhook["failing_since"]:
        return f"failing for {age(webhook['failing_since'])}"
    if (refused := webhook["refused"]) is not None:
        return f"refuses {refused['event']} of {refused['job_id']}: {refused['status'] or 'no response'}"
    return "catching up" if webhook["catching_up"] else "ok"


def _find_delivery(answer: dict[str, Any], message: str) -> dict[str, Any] | None:
    return next((delivery for delivery in answer["deliveries"] if delivery["message"] == message), None)


COMMANDS = (webhooks,)
