"""Removing: what the commands of servers and models share."""

from collections.abc import Mapping
from typing import Any

import click

from app.cli.common import client, print_json, quoted
from app.terminal import one_line, say


def remove(kind: str, name: str, params: Mapping[str, str]) -> dict[str, Any]:
    answer: dict[str, Any] = client().request("DELETE", f"/admin/{kind}/{quoted(name)}", params=params)
    return answer


def say_removal(it: Mapping[str, Any], as_json: bool) -> None:
    """How far it has come."""
    if as_json:
        print_json(it)
        return
    if it["state"] == "leaving":
        withheld = f", {it['withheld']} slots withheld" if it["withheld"] else ""
        remaining = f"{left(it['left'])}{withheld}"
        say(one_line(f"{it['name']} takes nothing new, and will be removed when this has ended: {remaining}."))
        return
    say(one_line(f"{it['name']} is removed."))
    if it["lost"]:
        say(one_line(f"Lost runs, whose jobs run again elsewhere: {', '.join(it['lost'])}."))
    if it["idle"]:
        say(one_line(f"Servers that serve no model any more: {', '.join(it['idle'])}."))


def left(by_state: Mapping[str, int] | None) -> str:
    """Jobs that have not ended."""
    return ", ".join(f"{count} {state}" for state, count in sorted((by_state or {}).items())) or "nothing"


def keep_command(kind: str) -> click.Command:
    """Make the command `keep` for a server or a model."""

    @click.argument("name", metavar=kind.upper())
    def keep(name: str) -> None:
        """Call its removal off."""
        client().request("DELETE", f"/admin/{kind}s/{quoted(name)}/removal")
        say(one_line(f"{name} stays."))

    return click.command("keep")(keep)
