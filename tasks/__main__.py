"""Celery's programs, as the Procfile starts them: python -m tasks worker|beat|flower ...

`celery -A tasks worker ...` does the same, and loads all that Celery's other commands need, and those that others have
added to them: a shell with its editor, and Flower.  That is 10 MiB in each process.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

import click
from celery.bin.base import CLIContext

from slotkeeper import logs
from tasks.celery_app import celery
from tasks.config import TaskSettings

_PROGRAMS = {"worker": "celery.bin.worker", "beat": "celery.bin.beat", "flower": "flower.command"}


def program(name: str) -> click.Command:
    """One of them, which is loaded now, with the options that are ours."""
    command: click.Command = getattr(import_module(_PROGRAMS[name]), name)
    known = {param.name for param in command.params}
    command.params.extend(option for option in celery.user_options.get(name, ()) if option.name not in known)
    return command


def run(arguments: Sequence[str]) -> None:
    """Be one of them until it ends; then this process does."""
    settings = TaskSettings()
    logs.configure(settings.log_level, settings.log_format)  # Celery warns before it asks for a way of logging.
    context = CLIContext(app=celery, no_color=False, workdir=None, quiet=settings.log_format == "json")
    _Programs("tasks").main(list(arguments), prog_name="python -m tasks", obj=context, auto_envvar_prefix="CELERY")


class _Programs(click.Group):
    """Loads only the one that is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_PROGRAMS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return program(cmd_name) if cmd_name in _PROGRAMS else None


if __name__ == "__main__":
    run(sys.argv[1:])
