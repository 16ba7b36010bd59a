"""Removing and renaming: what the commands of servers and models share."""

from collections.abc import Mapping
from typing import Any

import click

from cli.common import client, json_option, print_json, quoted
from client.terminal import one_line, say


def remove(kind: str, name: str, params: Mapping[str, str]) -> dict[str, Any]:
    answer: dict[str, Any] = client().call("DELETE", f"/admin/{kind}/{quoted(name)}", params=params)
    return answer


def say_departure(it: Mapping[str, Any], done: str, as_json: bool) -> None:
    """How far it has come."""
    if as_json:
        print_json(it)
        return
    if it["state"] == "leaving":
        withheld = f", {it['withheld']} slots withheld" if it["withheld"] else ""
        say(
            one_line(
                f"{it['name']} takes nothing new, and will be {done} when this has ended: {left(it['left'])}{withheld}."
            )
        )
        return
    say(one_line(f"{it['name']} is {done}."))
    if it["lost"]:
        say(one_line(f"Lost runs, whose jobs run again elsewhere: {', '.join(it['lost'])}."))
    if it["idle"]:
        say(one_line(f"Servers that serve no model any more: {', '.join(it['idle'])}."))


def left(by_state: Mapping[str, int] | None) -> str:
    """Jobs that have not ended."""
    return ", ".join(f"{count} {state}" for state, count in sorted((by_state or {}).items())) or "nothing"


def add_to(group: click.Group, kind: str) -> None:
    """Give a group the commands `rename` and `keep`, for a server or a model."""
    group.add_command(_rename_model() if kind == "model" else _rename_server())
    group.add_command(_keep(kind))


def _rename_server() -> click.Command:
    @click.argument("server")
    @click.argument("to")
    @json_option
    def rename(server: str, to: str, as_json: bool) -> None:
        """Give it another name, when what runs there has ended."""
        answer = client().post(f"/admin/servers/{quoted(server)}/rename", {"to": to})
        say_departure({**answer, "name": server}, f"called {to}", as_json)

    return click.command("rename")(rename)


def _rename_model() -> click.Command:
    @click.argument("model")
    @click.argument("to")
    @click.option(
        "--former-name-for",
        "former_name_s",
        type=click.FloatRange(0),
        default=86_400,
        show_default=True,
        metavar="SECONDS",
        help="How long submits under the old name are taken; 0: not at all.",
    )
    @click.option("--former-name-for-good", is_flag=True, help="They are taken until somebody ends that.")
    @json_option
    def rename(model: str, to: str, former_name_s: float, former_name_for_good: bool, as_json: bool) -> None:
        """Give it another name, while its jobs wait and run."""
        body = {"to": to, "former_name_s": None if former_name_for_good else former_name_s}
        answer = client().post(f"/admin/models/{quoted(model)}/rename", body)
        if as_json:
            print_json(answer)
        else:
            say(one_line(f"{model} is called {to} now."))

    return click.command("rename")(rename)


def _keep(kind: str) -> click.Command:
    @click.argument("name", metavar=kind.upper())
    def keep(name: str) -> None:
        """Call its removal or renaming off."""
        client().call("DELETE", f"/admin/{kind}s/{quoted(name)}/removal")
        say(one_line(f"{name} stays."))

    return click.command("keep")(keep)
