"""Commands that run processes on this machine, and `migrate`; none of them needs the API."""

import os
import sys
from contextlib import suppress

import click

from app.cli.output import acting_locally
from app.terminal import echo, escape_line

_SHOWN_PROCESSES = 5


@click.command()
@click.option("--demo/--no-demo", default=True, help="Start three demo servers and run a first job.  [default: yes]")
@click.option(
    "--demo-jobs", default=0, metavar="N", type=click.IntRange(0, 10_000), help="Run N different jobs instead of one."
)
@click.option("--exit-after-demo", is_flag=True, help="Stop after these jobs; exit status 0: all completed.")
def up(demo: bool, demo_jobs: int, exit_after_demo: bool) -> None:
    """Run everything on this machine until Ctrl-C.

    The state is stored in the folder SLOTKEEPER_HOME (default: var).  SLOTKEEPER_PORT, SLOTKEEPER_REDIS_PORT and
    SLOTKEEPER_FLOWER_PORT set the ports.  To use your servers, set SLOTKEEPER_DATABASE_URL, SLOTKEEPER_REDIS_URL and
    SLOTKEEPER_BROKER_URL.
    """
    if not demo and (demo_jobs or exit_after_demo):
        raise click.UsageError("--no-demo excludes --demo-jobs and --exit-after-demo; leave one of them out.")
    from app.up.launcher import UpOptions, run_up

    sys.exit(run_up(UpOptions(demo, demo_jobs, exit_after_demo), _print_line))


def _print_line(line: str) -> None:
    with suppress(OSError):  # The reader of a pipe may have closed it.
        echo(line)


@click.command()
def flower() -> None:
    """Run Flower with the password in SLOTKEEPER_HOME.

    Like `celery -A tasks flower`, but on 127.0.0.1, with a password and with bounded memory.  Flower's variables
    (FLOWER_BASIC_AUTH, FLOWER_ADDRESS, FLOWER_MAX_TASKS, ...) override this.
    """
    from app.config import UpSettings
    from app.up.installation_folder import flower_password
    from slotkeeper.config import StorageSettings
    from slotkeeper.process import tune_garbage_collection

    defaults = {
        "FLOWER_ADDRESS": "127.0.0.1",
        "FLOWER_PORT": str(UpSettings().flower_port),
        "FLOWER_MAX_TASKS": "10000",
        "FLOWER_MAX_WORKERS": "200",
        "FLOWER_PERSISTENT": "false",
    }
    # Not on the command line: every user of the host can list the arguments of processes.
    if "FLOWER_BASIC_AUTH" not in os.environ and "FLOWER_AUTH" not in os.environ:
        defaults["FLOWER_BASIC_AUTH"] = f"slotkeeper:{flower_password(StorageSettings().home)}"
    os.environ.update({name: value for name, value in defaults.items() if name not in os.environ})

    from tasks.__main__ import run
    from tasks.celery_app import celery

    _require_flower_password()
    tune_garbage_collection()
    celery.conf.include = ["tasks.extensions.signal_handlers"]  # Flower shows tasks and runs none.
    celery.conf.broker_transport = None  # Flower chooses its broker page by the scheme of the URL.
    run(["flower"])


def _require_flower_password() -> None:
    """Require Flower's password for /metrics and /healthcheck, which are public otherwise."""
    from flower.views.monitor import Healthcheck, Metrics
    from tornado.web import authenticated

    for view in (Metrics, Healthcheck):
        view.get = authenticated(view.get)


@click.command()
@click.option("--to", "revision", metavar="REVISION", help="Change to this schema instead; it may be an older one.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation before columns or tables are dropped.")
@click.option("--force", is_flag=True, help="Drop them even if processes run, which then fail.")
def migrate(revision: str | None, yes: bool, force: bool) -> None:
    """Bring the database to the schema of this release.

    Processes may run meanwhile.  Use --to before you install an older release: it goes back to the schema that the
    older release needs, and drops newer columns with their content.  Before that, make a backup and stop all processes;
    it refuses while one runs.
    """
    from migrations.migrate import dropped_by, migrate_to, upgrade
    from slotkeeper.config import StorageSettings
    from slotkeeper.state_folder import make_private_folder

    settings = StorageSettings()
    with acting_locally():
        if not settings.database_url:
            make_private_folder(settings.home)
        dropped = dropped_by(settings.sqlalchemy_url, revision) if revision else []
    if dropped:
        _require_stopped(force)
        echo(f"Schema {revision} does not have {', '.join(dropped)}: this drops them with their content.", err=True)
        if not yes:
            click.confirm("Drop them?", abort=True, err=True)
    with acting_locally():
        if revision is None:
            upgrade(settings.sqlalchemy_url)
        else:
            migrate_to(settings.sqlalchemy_url, revision)
    echo("The database has the schema " + (revision or "that this release needs") + ".")


def _require_stopped(force: bool) -> None:
    """Require that no process of the installation reports that it is alive, unless `force`.  Raises ClickException."""
    from redis.exceptions import RedisError

    from tasks.services import processes

    try:
        with acting_locally():
            alive = [process for process in processes().read_all() if process.is_alive]
    except RedisError:
        echo("Redis does not answer, so it is not known whether processes run.", err=True)
        return
    if alive and not force:
        names = ", ".join(f"{escape_line(process.name)} ({process.role})" for process in alive[:_SHOWN_PROCESSES])
        more = f", and {len(alive) - _SHOWN_PROCESSES} more" if len(alive) > _SHOWN_PROCESSES else ""
        raise click.ClickException(
            f"These processes run, and would fail: {names}{more}.  Stop them first, or use --force; "
            "a process that was killed counts as running for 10 s more."
        )


def _serve() -> click.Command:
    from slotkeeper.serve.__main__ import main

    return main


def _agent() -> click.Command:
    from slotkeeper.agent.__main__ import main

    return main


COMMANDS = (up, _serve(), _agent(), migrate, flower)
