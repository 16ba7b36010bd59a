"""Commands about webhooks: addresses that are told what happens, and the secrets that messages are signed with."""

import sys
import time
from typing import Any

import click

from app.cli.output import (
    age,
    api_client,
    json_option,
    limit_option,
    path_segment,
    print_fields,
    print_json,
    print_table,
    read_json,
)
from app.terminal import echo, escape_line

_TESTED_WITHIN_S = 30.0

tenant_option = click.option("--tenant", default="default", show_default=True, help="Whose.")
_webhook = click.argument("webhook")
_webhook_or_callbacks = click.argument("webhook", required=False)
_events = click.option("--event", "events", metavar="TYPE", multiple=True, help="Told of it; repeat it.")
_template = click.option("--template", metavar="JSON", help="The body's form; @FILE reads a file, - standard input.")
_description = click.option("--description", help="For people.")
_max_per_s = click.option(
    "--max-per-s", type=float, help="Messages that it is sent in a second; all at once if not set."
)


@click.group()
def webhooks() -> None:
    """Addresses that are told what happens to jobs, and how they know that it is us."""


@webhooks.command("list")
@click.option("--tenant", help="Only this tenant's; for administrators.")
@json_option
def list_webhooks(tenant: str | None, as_json: bool) -> None:
    """List webhooks, and how they do."""
    answer = api_client().get("/webhooks", tenant=tenant, limit=200)
    if as_json:
        print_json(answer)
        return
    rows = [(it["webhook"], it["tenant"], it["url"], _how(it), it["waiting"]) for it in answer["webhooks"]]
    print_table(("webhook", "tenant", "address", "how it does", "waiting"), rows, "There are no webhooks.")


@webhooks.command("add")
@click.argument("url")
@_events
@_template
@_description
@_max_per_s
@click.option("--tenant", help="Whose jobs; of others than oneself for administrators.")
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
    """Have an address told what happens to jobs: their ends, or what --event names.

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
    echo(escape_line(f"{answer['webhook']} tells {answer['url']} of {', '.join(answer['events'])}."))
    _say_secret(answer["secret"])


@webhooks.command("show")
@_webhook
@json_option
def show_webhook(webhook: str, as_json: bool) -> None:
    """Show a webhook, and how it does."""
    answer = api_client().get(f"/webhooks/{path_segment(webhook)}")
    if as_json:
        print_json(answer)
    else:
        print_fields(answer)


@webhooks.command("change")
@_webhook
@click.option("--url", help="Its new address.")
@_events
@_template
@click.option("--no-template", is_flag=True, help="Our own form of the body again.")
@_description
@_max_per_s
@click.option("--no-pace", is_flag=True, help="All at once again.")
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
    """Change its address, events, template, description or pace; what is not named stays."""
    given = {"url": url, "events": list(events) or None, "description": description, "max_per_s": max_per_s}
    body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if template is not None or no_template:
        body["template"] = None if template is None else read_json(template, "--template")
    if no_pace and max_per_s is not None:
        raise click.UsageError("Name one of --max-per-s and --no-pace.")
    if no_pace:
        body["max_per_s"] = None
    if not body:
        raise click.UsageError("Name what shall change.")
    api_client().request("PATCH", f"/webhooks/{path_segment(webhook)}", body=body)
    echo(escape_line(f"{webhook} is changed."))


@webhooks.command("test")
@_webhook
@json_option
def test_webhook(webhook: str, as_json: bool) -> None:
    """Send it a test, and say what it answers.  Exit status 1: it was not taken."""
    api, path = api_client(), f"/webhooks/{path_segment(webhook)}"
    message = api.post(f"{path}/test")["message"]
    until = time.monotonic() + _TESTED_WITHIN_S
    while (found := _try_of(api.get(f"{path}/deliveries", limit=50), message)) is None:
        if time.monotonic() > until:
            raise click.ClickException("It has not been sent yet: does the process of webhooks run?")
        time.sleep(0.2)
    if as_json:
        print_json(found)
    else:
        said = f": {found['answer']}" if found["answer"] else ""
        told = f"It answered {found['status']}{said}" if found["error"] is None else found["error"]
        echo(escape_line(f"{told} ({found['latency_ms']} ms)"))
    if found["outcome"] != "delivered":
        sys.exit(1)


@webhooks.command("rotate")
@_webhook_or_callbacks
@click.option("--tenant", help="Without WEBHOOK: whose callbacks of single jobs; default if not given.")
@json_option
def rotate_secret(webhook: str | None, tenant: str | None, as_json: bool) -> None:
    """Give a webhook a new secret, and print it; without WEBHOOK: the callbacks of a tenant's single jobs.

    For a day messages are signed with the one before as well.  Rotate twice to end a secret that others know.
    """
    if webhook is None:
        _show("POST", tenant or "default", as_json)
        return
    _refuse_tenant(tenant)
    answer = api_client().post(f"/webhooks/{path_segment(webhook)}/rotate")
    if as_json:
        print_json(answer)
        return
    _say_secret(answer["secret"])
    echo(f"Until {answer['former_until']} messages are also signed with the secret before it.", err=True)


@webhooks.command("enable")
@_webhook
def enable_webhook(webhook: str) -> None:
    """Tell it again, from where it was disabled on."""
    api_client().post(f"/webhooks/{path_segment(webhook)}/enable")
    echo(escape_line(f"{webhook} is enabled."))


@webhooks.command("disable")
@_webhook
@click.option("--reason", help="Why; it is shown wherever the webhook is.")
def disable_webhook(webhook: str, reason: str | None) -> None:
    """Tell it nothing until it is enabled again; it is told then what it has missed."""
    api_client().post(f"/webhooks/{path_segment(webhook)}/disable", {} if reason is None else {"reason": reason})
    echo(escape_line(f"{webhook} is disabled."))


@webhooks.command("remove")
@_webhook
def remove_webhook(webhook: str) -> None:
    """Forget it, with what it is owed."""
    api_client().request("DELETE", f"/webhooks/{path_segment(webhook)}")
    echo(escape_line(f"{webhook} is removed."))


@webhooks.command("deliveries")
@_webhook_or_callbacks
@click.option("--job", help="Of this job's callback_url, instead of a WEBHOOK.")
@click.option("--given-up", is_flag=True, help="What it was not told in the end, instead of each try.")
@click.option("--tenant", help="Without WEBHOOK: only this tenant's; for administrators.")
@limit_option
@json_option
def list_deliveries(
    webhook: str | None, job: str | None, given_up: bool, tenant: str | None, limit: int, as_json: bool
) -> None:
    """List the last tries of its messages, the newest first.

    With --given-up and without WEBHOOK: the callbacks of single jobs that were given up.
    """
    if given_up and webhook is None and job is None:
        _list_callbacks(tenant, limit, as_json)
        return
    if (webhook is None) is (job is None) or (given_up and job):
        raise click.UsageError("Name a WEBHOOK, or --job, or --given-up.")
    _refuse_tenant(tenant)
    if given_up:
        answer = api_client().get("/webhooks/given-up", webhook=webhook, limit=min(limit, 200))
        found = answer["messages"]
        rows: list[tuple[Any, ...]] = [
            (it["message"], it["event"], it["job_id"], it["tries"], it["error"]) for it in found
        ]
        titles: tuple[str, ...] = ("message", "event", "job", "tries", "why")
    else:
        path = "callbacks" if webhook is None else path_segment(webhook)
        answer = api_client().get(f"/webhooks/{path}/deliveries", job_id=job, limit=min(limit, 200))
        rows = [
            (it["message"], it["event"], age(it["at"]), it["number"], it["outcome"], it["status"], it["latency_ms"],
             it["error"] or it["answer"])
            for it in answer["deliveries"]
        ]  # fmt: skip
        titles = ("message", "event", "ago", "try", "outcome", "status", "ms", "what it said")
    if as_json:
        print_json(answer)
    else:
        print_table(titles, rows, "There is nothing.")


@webhooks.command("replay")
@_webhook_or_callbacks
@click.option("--message", help="One message, by its webhook-id.")
@click.option("--since", help="All that it wants since then: ISO 8601 with its zone.")
@click.option("--given-up", is_flag=True, help="All that was given up.")
@click.option("--tenant", help="Without WEBHOOK: only this tenant's; for administrators.")
def replay_webhook(
    webhook: str | None, message: str | None, since: str | None, given_up: bool, tenant: str | None
) -> None:
    """Tell it once more, under the same webhook-ids.

    Without WEBHOOK: callbacks of single jobs; of those --since means what was given up of jobs that ended since.

    \b
    slotkeeper webhooks replay WEBHOOK --since 2026-11-22T20:00:00Z
    slotkeeper webhooks replay --given-up
    """
    given = {"message": message, "since": since, "given_up": given_up or None}
    body = {name: value for name, value in given.items() if value is not None}
    if len(body) != 1:
        raise click.UsageError("Name one of --message, --since and --given-up.")
    if webhook is None:
        told = api_client().post("/webhooks/callbacks/replay", body | ({} if tenant is None else {"tenant": tenant}))
        echo(f"Callbacks that are sent once more: {told['sent']}.")
        return
    _refuse_tenant(tenant)
    answer = api_client().post(f"/webhooks/{path_segment(webhook)}/replay", body)
    what = message or (f"all since {since}" if since else f"{answer['given_up']} messages that were given up")
    echo(escape_line(f"{webhook} is told once more of {what}."))


@webhooks.command("secret")
@tenant_option
@json_option
def show_secret(tenant: str, as_json: bool) -> None:
    """Print the secret by which the callbacks of a tenant's single jobs are verified.

    Each tenant has one of its own, in the form of Standard Webhooks (whsec_...).  It opens nothing else.
    """
    _show("GET", tenant, as_json)


def _list_callbacks(tenant: str | None, limit: int, as_json: bool) -> None:
    found = list(api_client().iter_pages("/webhooks/callbacks/given-up", "callbacks", limit, tenant=tenant))
    if as_json:
        print_json(found)
        return
    rows = [(it["message"], it["tenant"], it["status"], age(it["ended_at"]), it["tries"], it["error"]) for it in found]
    print_table(("message", "tenant", "job", "ended", "tries", "why"), rows, "There is nothing.")


def _refuse_tenant(tenant: str | None) -> None:
    if tenant is not None:
        raise click.UsageError("A webhook has its tenant already; leave --tenant out.")


def _show(method: str, tenant: str, as_json: bool) -> None:
    answer = api_client().request(method, f"/admin/webhook-secrets/{path_segment(tenant)}")
    if as_json:
        print_json(answer)
        return
    echo(answer["secrets"][0])
    if answer["former_until"]:
        echo(f"Until {answer['former_until']} messages are also signed with the secret before it.", err=True)


def _say_secret(secret: str) -> None:
    echo(secret)
    echo("Keep it: it cannot be read again.  Its receiver verifies messages with it.", err=True)


def _how(it: dict[str, Any]) -> str:
    if it["state"] == "disabled":
        return f"disabled: {it['reason']}" if it["reason"] else "disabled"
    if it["failing_since"]:
        return f"failing for {age(it['failing_since'])}"
    return "catching up" if it["behind"] else "well"


def _try_of(answer: dict[str, Any], message: str) -> dict[str, Any] | None:
    return next((it for it in answer["deliveries"] if it["message"] == message), None)


COMMANDS = (webhooks,)
