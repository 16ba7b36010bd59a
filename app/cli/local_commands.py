"""Commands that run processes on this machine or change the database directly, without the API."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

from app.cli import state_commands
from app.cli.output import json_option, print_json, print_table
from app.terminal import echo, escape_line
from slotkeeper.errors import NotFound

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
    from app.up.launcher import UpOptions
    from app.up.launcher import run_up as start

    sys.exit(start(UpOptions(demo, demo_jobs, exit_after_demo), _print_line))


def _print_line(line: str) -> None:
    with suppress(OSError):  # The reader of a pipe may have closed it.
        echo(line)


@click.command()
def flower() -> None:
    """Run Flower with the password in SLOTKEEPER_HOME.

    Like `celery -A tasks flower`, but on 127.0.0.1, with a password and with bounded memory.  Flower's variables
    (FLOWER_BASIC_AUTH, FLOWER_ADDRESS, FLOWER_MAX_TASKS, ...) override this.
    """
    from app.up.installation_folder import flower_password
    from app.up.roles import UpSettings
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

    Use --to before you install an older release: it goes back to the schema that the older release needs.  This drops
    newer columns with their content, so make a backup first.  Stop all processes before it: it refuses while one runs.
    """
    from migrations.migrate import dropped_by, migrate_to, upgrade
    from slotkeeper.config import StorageSettings
    from slotkeeper.state_folder import make_private_folder

    settings = StorageSettings()
    with _acting_locally():
        if not settings.database_url:
            make_private_folder(settings.home)
        dropped = dropped_by(settings.sqlalchemy_url, revision) if revision else []
    if dropped:
        _require_stopped(force)
        echo(f"Schema {revision} does not have {', '.join(dropped)}: this drops them with their content.", err=True)
        if not yes:
            click.confirm("Drop them?", abort=True, err=True)
    with _acting_locally():
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
        with _acting_locally():
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


@click.group()
def tenants() -> None:
    """Manage tenants, their keys and their limits.

    list, add, change, rotate and remove work directly on the database of this machine.  pause, drain, freeze and resume
    call the API, so that they take effect at once on all hosts.
    """


@tenants.command("list")
@json_option
def list_tenants(as_json: bool) -> None:
    """List the tenants with their limits and states.

    A tenant without a key is listed only while it is paused, draining or frozen.
    """
    with _acting_locally():
        by_name = {tenant.name: tenant for tenant in _tenants().list_all()}
        states = _states()
    fields = ("admin", "rate_per_s", "burst")
    listed = [
        {
            "name": name,
            **{field: getattr(by_name.get(name), field, None) for field in fields},
            "state": states.get(name, "online"),
        }
        for name in sorted(by_name.keys() | states.keys())
    ]
    if as_json:
        print_json(listed)
        return
    titles = ("name", "admin", "submits per s", "at once", "state")
    print_table(
        titles,
        (list(tenant.values()) for tenant in listed),
        "There are no tenants.  Add one with: slotkeeper tenants add NAME",
    )


@tenants.command("add")
@click.argument("name")
@click.option("--admin", is_flag=True, help="The tenant may also administer.")
@click.option("--audit", is_flag=True, help="The tenant may read the audit log.")
@click.option("--rate", type=click.IntRange(min=1), help="Submits per second.  [default: no limit]")
@click.option("--burst", type=click.IntRange(min=1), help="Submits at once, above --rate.")
@json_option
def add_tenant(name: str, admin: bool, audit: bool, rate: int | None, burst: int | None, as_json: bool) -> None:
    """Add a tenant and print its key.

    The key cannot be read again.
    """
    from slotkeeper.clock import now_ms
    from slotkeeper.registry.tenants import Tenant

    if burst is not None and rate is None:
        raise click.UsageError("--burst needs --rate; give both.")
    with _acting_locally():
        key = _tenants().add(Tenant(name, admin, rate, burst, audit), now_ms())
    if as_json:
        print_json({"name": name, "key": key})
        return
    echo(key)
    from app.config import AppSettings

    use = (
        "Commands use it as SLOTKEEPER_KEY, requests as `Authorization: Bearer KEY`."
        if AppSettings().require_keys
        else "The API does not require keys before it is started with SLOTKEEPER_REQUIRE_KEYS=true."
    )
    echo(f"Save this key now: it cannot be read again.  {use}", err=True)


@tenants.command("change")
@click.argument("name")
@click.option("--rate", type=click.IntRange(0, 1_000_000), help="Submits per second; 0: no limit.")
@click.option("--burst", type=click.IntRange(0, 1_000_000), help="Submits at once; 0: as many as --rate says.")
def change_tenant(name: str, rate: int | None, burst: int | None) -> None:
    """Change the limits of a tenant.

    The new limits take effect within seconds.  The key and the webhooks of the tenant stay.
    """
    limits = {field: value or None for field, value in (("rate_per_s", rate), ("burst", burst)) if value is not None}
    if not limits:
        raise click.UsageError("Nothing to change; give --rate, --burst or both.")
    with _acting_locally():
        _tenants().change(name, limits)
    echo(f"Tenant {escape_line(name)} is changed.")


@tenants.command("rotate")
@click.argument("name")
@click.option(
    "--overlap", default="0s", metavar="TIME", help="How long the previous key stays valid, such as 30min or 1h."
)
@json_option
def rotate_key(name: str, overlap: str, as_json: bool) -> None:
    """Create a new key for a tenant and print it.

    The new key is valid at once and cannot be read again.  The previous key stops working within seconds, or after
    --overlap.  If you rotate again before that, only the two latest keys are valid.
    """
    from slotkeeper.clock import now_ms

    overlap_s = _seconds(overlap)
    with _acting_locally():
        key = _tenants().rotate_key(name, overlap_s * 1000, now_ms())
    if as_json:
        print_json({"name": name, "key": key, "overlap_s": overlap_s})
        return
    echo(key)
    echo(f"Save this key now: it cannot be read again.  The previous key stays valid for {overlap}.", err=True)


def _seconds(duration: str) -> int:
    """Return the seconds of a duration such as 90s, 30min, 1h or 2d.  Raises UsageError."""
    parts = re.fullmatch("([0-9]{1,7})(s|min|h|d)", duration)
    seconds = int(parts[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86_400}[parts[2]] if parts else None
    if seconds is None or seconds > 30 * 86_400:
        raise click.UsageError(f"--overlap {duration!r} is not a time of at most 30d; write 90s, 30min, 1h or 2d.")
    return seconds


@tenants.command("remove")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def remove_tenant(name: str, yes: bool) -> None:
    """Remove a tenant with its keys and webhooks.

    The command shows what the tenant has and asks for confirmation.  The jobs of the tenant stay and continue.
    """
    from slotkeeper.outbox.subscriptions import delete_of_tenant

    with _acting_locally():
        registry = _tenants()
        if all(tenant.name != name for tenant in registry.list_all()):
            raise NotFound(f"There is no tenant {name!r}.")
        holdings = _format_holdings(name)
    echo(f"Tenant {escape_line(name)} has {holdings}.", err=True)
    echo("Its keys stop working and its webhooks are deleted; its jobs continue.", err=True)
    if not yes:
        click.confirm("Remove this tenant?", abort=True, err=True)
    with _acting_locally():
        registry.remove(name, also=delete_of_tenant)
    echo(f"Tenant {escape_line(name)} is removed.")


def _format_holdings(name: str) -> str:
    """Return the numbers of jobs and webhooks of a tenant, as text."""
    from routing.queries.job_list import count_tenant_holdings
    from tasks.services import database

    holdings = count_tenant_holdings(database(), name)
    jobs = ", ".join(f"{count} {state}" for state, count in holdings.active.items()) or "none"
    return f"jobs that have not ended: {jobs}; webhooks: {holdings.webhooks}"


def _states() -> dict[str, str]:
    """Return the state of each tenant that is not online."""
    from tasks.services import catalog

    return {name: tenant.state for name, tenant in catalog().read().tenants.items()}


def _tenants():  # type: ignore[no-untyped-def]
    """Return the registry of tenants.  Raises ClickException: the database has another schema."""
    from migrations.migrate import check
    from slotkeeper.registry.tenants import Tenants
    from tasks.services import database

    if problem := check(database().url):
        raise click.ClickException(problem)
    return Tenants(database())


@contextmanager
def _acting_locally() -> Iterator[None]:
    """Record the user of the terminal as the actor of changes, and turn errors into one line.

    Raises ClickException for errors of the database and for invalid settings.
    """
    import socket

    from slotkeeper import audit, logs
    from slotkeeper.errors import SlotkeeperError

    logs.configure()
    try:
        with audit.acting_as(audit.Actor(_user_name(), "command line", socket.gethostname())):
            yield
    except SlotkeeperError as error:
        raise click.ClickException(error.detail) from error
    except (ValueError, OSError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error


def _user_name() -> str:
    """Return the name of the user; in a container the user may have only an id."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def _serve() -> click.Command:
    from slotkeeper.serve.__main__ import main

    return main


state_commands.add_state_commands(tenants, "tenant")

COMMANDS = (up, _serve(), migrate, tenants, flower)
