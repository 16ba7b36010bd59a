"""Generate the page of commands from the output of `--help`."""

from collections.abc import Iterator

import click

from app.cli.__main__ import main

_TOP = """# Command line

`make setup` installs `slotkeeper` into `.venv/bin`. `python -m tools.reference` writes this page from what `--help`
prints.

"""


def page() -> str:
    """Return the Markdown of the page."""
    root = click.Context(main, info_name="slotkeeper", **main.context_settings)
    return _TOP + "".join(_sections(main, root))


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the section of a command, then those of its subcommands."""
    level = 2 if context.parent is None or context.parent.parent is None else 3
    yield f"{'#' * level} {context.command_path}\n\n```text\n{command.get_help(context).rstrip()}\n```\n\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield from _sections(child, click.Context(child, info_name=name, parent=context))
