"""Run one of Celery's programs, as the Procfile does: python -m tasks worker|beat|flower ...

`celery -A tasks worker ...` does the same, but loads all commands of Celery and of its plugins, such as the shell and
Flower.  They take 11 MiB in each worker and 8 MiB in Flower.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

import click
from celery.bin.base import CLIContext

from slotkeeper import logs
from slotkeeper.config import exit_if_refused
from tasks.celery_app import celery
from tasks.config import TaskSettings

_PROGRAMS = {"worker": "celery.bin.worker", "beat": "celery.bin.beat", "flower": "flower.command"}


def program(name: str) -> click.Command:
    """Load a program, and return its command with the options that Slotkeeper adds (`app.user_options`)."""
    command: click.Command = getattr(import_module(_PROGRAMS[name]), name)
    existing = {param.name for param in command.params}
    command.params.extend(option for option in celery.user_options.get(name, ()) if option.name not in existing)
    return command


def run(arguments: Sequence[str]) -> None:
    """Run the program that the arguments name.  This process ends with it."""
    with exit_if_refused():
        settings = TaskSettings()
        logs.configure(settings.log_level, settings.log_format)  # Celery logs before it sends `setup_logging`.
        _ = celery.conf.broker_url  # Loads celeryconfig.py, which reads the settings.
    context = CLIContext(app=celery, no_color=False, workdir=None, quiet=settings.log_format == "json")
    _Programs("tasks").main(list(arguments), prog_name="python -m tasks", obj=context, auto_envvar_prefix="CELERY")


class _Programs(click.Group):
    """A command group that imports only the program that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_PROGRAMS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return program(cmd_name) if cmd_name in _PROGRAMS else None


if __name__ == "__main__":
    run(sys.argv[1:])
