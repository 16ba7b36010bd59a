"""The page of commands, written from the command line's own help."""

from collections.abc import Iterator

import click

from app.cli.__main__ import main

_TOP = """# Command line

`make setup` installs `slotkeeper` into `.venv/bin`. `python -m tools.reference` writes this page from what `--help`
prints.

"""


def page() -> str:
    return _TOP + "".join(_command(main, "slotkeeper", []))


def _command(command: click.Command, name: str, parents: list[str]) -> Iterator[str]:
    """Yield the section of a command, then those of its subcommands."""
    context = click.Context(command, info_name=" ".join([*parents, name]), terminal_width=100, max_content_width=100)
    yield f"{'#' * min(2 + max(0, len(parents) - 1), 3)} {' '.join([*parents, name])}\n\n"
    yield f"```text\n{command.get_help(context).rstrip()}\n```\n\n"
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None and not found.hidden:
                yield from _command(found, child, [*parents, name])
