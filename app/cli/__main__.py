"""The command line.  Each group of commands has its file beside this one; what is slow is imported inside them."""

import click

from app.cli import admin, audit, batches, defaults, doctor, health, jobs, local, presets, secrets, webhooks
from app.cli.conform import conform
from app.cli.drill import drill
from app.cli.simulate import simulate
from app.terminal import SafeGroup


@click.group(cls=SafeGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="slotkeeper", message="slotkeeper %(version)s")
def main() -> None:
    """A dispatcher for GPU inference: durable queue, exact order, one slot per job.

    Commands that ask the API find it at SLOTKEEPER_URL (default: http://127.0.0.1:8000, or SLOTKEEPER_PORT there),
    and show it the key in SLOTKEEPER_KEY.  Exit status: 0 done, 1 not done, 2 wrong usage.
    """


_GROUPS = (local, jobs, batches, admin, defaults, audit, doctor, health, webhooks, secrets, presets)
for command in (*(one for group in _GROUPS for one in group.COMMANDS), conform, drill, simulate):
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="slotkeeper")
