"""Commands about webhooks: the secret with which a tenant verifies them."""

import click

from cli.common import client, json_option, print_json, quoted
from client.terminal import say

tenant_option = click.option("--tenant", default="default", show_default=True, help="Whose.")


@click.group()
def webhooks() -> None:
    """Messages about ended jobs, and the secret by which their receiver knows that they are ours."""


@webhooks.command("secret")
@tenant_option
@json_option
def show_secret(tenant: str, as_json: bool) -> None:
    """Print the secret with which a tenant verifies its webhooks.

    Each tenant has one of its own, in the form of Standard Webhooks (whsec_...).  It opens nothing else.
    """
    _show("GET", tenant, as_json)


@webhooks.command("rotate")
@tenant_option
@json_option
def rotate_secret(tenant: str, as_json: bool) -> None:
    """Give a tenant a new webhook secret, and print it.

    For a day messages are signed with the one before as well.  Rotate twice to end a secret that others know.
    """
    _show("POST", tenant, as_json)


def _show(method: str, tenant: str, as_json: bool) -> None:
    answer = client().call(method, f"/admin/webhook-secrets/{quoted(tenant)}")
    if as_json:
        print_json(answer)
        return
    say(answer["secrets"][0])
    if answer["former_until"]:
        say(f"Until {answer['former_until']} messages are also signed with the secret before it.", err=True)


COMMANDS = (webhooks,)
