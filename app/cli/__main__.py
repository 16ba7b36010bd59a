"""Build the command `slotkeeper` from the modules of this package, one for each group of commands."""

import click

from app.cli import (
    batch_commands,
    credit_commands,
    job_commands,
    key_commands,
    local_commands,
    model_commands,
    node_commands,
    operation_commands,
    server_commands,
    submit_commands,
    tenant_commands,
    validation_commands,
    webhook_commands,
)
from app.cli.conform_command import conform
from app.cli.simulate_command import simulate
from app.cli.verify_command import verify
from app.terminal import SafeGroup

_GROUPS = (
    local_commands,
    submit_commands,
    job_commands,
    batch_commands,
    server_commands,
    model_commands,
    operation_commands,
    webhook_commands,
    tenant_commands,
    key_commands,
    credit_commands,
    validation_commands,
    node_commands,
)


@click.group(cls=SafeGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="slotkeeper", message="slotkeeper %(version)s")
def main() -> None:
    """Dispatch GPU inference: durable queue, exact order, one slot per job.

    Commands call the API at SLOTKEEPER_URL with the key in SLOTKEEPER_KEY.  Without it they call the installation
    on this machine whose state folder SLOTKEEPER_HOME names (default: ./var), or http://127.0.0.1:8000.  If your
    own certificate authority signed the certificate of the API, set SLOTKEEPER_CA to the file with its certificate.
    Exit status: 0 success; 1 failure, for example of a job with --wait; 2 wrong usage; 3 unknown, because the API
    did not answer; 130 interrupted by Ctrl-C.

    \b
    Completion in bash (also zsh_source, fish_source):
    eval "$(_SLOTKEEPER_COMPLETE=bash_source slotkeeper)"
    """


for command in (*(member for group in _GROUPS for member in group.COMMANDS), conform, simulate, verify):
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="slotkeeper")
