"""Exit statuses that all commands have in common."""

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from app.cli.__main__ import main
from tests.support.scripted import refused_url

WITHOUT_API = {"agent", "conform", "doctor", "flower", "health", "migrate", "serve", "simulate", "up", "verify"}
"""Commands that do not call the API, or have other exit statuses."""
BY_THE_DATABASE = {("tenants", name) for name in ("add", "change", "list", "remove", "show")}
BY_THE_DATABASE |= {("keys", name) for name in ("add", "list", "revoke", "rotate", "token")}
WAITS_FOR_THE_API = {("submit-file",), ("watch",), *(("batches", name) for name in ("submit", "wait", "results"))}
OPTIONS = {
    ("nodes", "token"): ["--pool", "homes"],
    ("secrets", "set"): ["--all-models"],
    ("webhooks", "change"): ["--no-pace"],
    ("webhooks", "deliveries"): ["--given-up"],
    ("webhooks", "replay"): ["--given-up"],
}
"""What these commands need to have something to do."""


def _commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group) or command.invoke_without_command:
        yield words, command
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            path = (*words, name)
            if path[0] not in WITHOUT_API and path not in BY_THE_DATABASE | WAITS_FOR_THE_API:
                yield from _commands(inner, path)


def _arguments(command: click.Command) -> list[str]:
    url = "http://10.0.0.4:5000"
    samples = {
        "url": url,
        "endpoint": url,
        "settings": "max_retries=1",
        "payload": "{}",
        "amount": "1",
        "price_list": "{}",
        "expected": "1",
    }
    names = [argument.name or "" for argument in command.params if isinstance(argument, click.Argument)]
    return [samples.get(name, "abc") for name in names]


@pytest.mark.parametrize(("words", "command"), [pytest.param(*row, id=" ".join(row[0])) for row in _commands(main)])
def test_every_command_exits_with_3_if_the_api_does_not_respond(
    words: tuple[str, ...], command: click.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOTKEEPER_URL", refused_url())
    done = CliRunner().invoke(main, [*words, *_arguments(command), *OPTIONS.get(words, ())], input="y\n")
    assert done.exit_code == 3, f"a command that does not call the API must be listed in BY_THE_DATABASE: {done.output}"
    assert "Nothing answers at" in done.output and "Traceback" not in done.output
