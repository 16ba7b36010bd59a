"""The command line.  Each group of commands has its file beside this one; what is slow is imported inside them."""

import click

from app.cli import (
    audit,
    doctor,
    health,
    job_commands,
    local_commands,
    model_commands,
    presets,
    server_commands,
    submit_commands,
    tenant_commands,
    webhook_commands,
)
from app.cli.conform_command import conform
from app.cli.simulate_command import simulate
from app.terminal import SafeGroup


@click.group(cls=SafeGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="slotkeeper", message="slotkeeper %(version)s")
def main() -> None:
    """A dispatcher for GPU inference: durable queue, exact order, one slot per job.

    Commands that ask the API find it at SLOTKEEPER_URL (default: http://127.0.0.1:8000, or SLOTKEEPER_PORT there),
    and show it the key in SLOTKEEPER_KEY.  Exit status: 0 done, 1 not done, such as a job that was waited for and
    failed, 2 wrong usage, 3 not known, because the API could not be reached or stayed away.
    """


_GROUPS = (
    local_commands,
    submit_commands,
    job_commands,
    server_commands,
    model_commands,
    audit,
    doctor,
    health,
    webhook_commands,
    tenant_commands,
    presets,
)
for command in (*(one for group in _GROUPS for one in group.COMMANDS), conform, simulate):
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="slotkeeper")
