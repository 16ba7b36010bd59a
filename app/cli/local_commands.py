"""Commands that work on this machine: on its processes, and on the record itself."""

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


@click.command()
@click.option("--demo/--no-demo", default=True, help="Start three demo servers and run a first job.  [default: yes]")
@click.option("--demo-jobs", default=0, metavar="N", type=click.IntRange(0, 10_000), help="Run N mixed jobs instead.")
@click.option("--exit-after-demo", is_flag=True, help="Stop then; exit status 0: all have ended well.")
def up(demo: bool, demo_jobs: int, exit_after_demo: bool) -> None:
    """Run everything on this machine until Ctrl-C.

    State lies in SLOTKEEPER_HOME (default: var).  SLOTKEEPER_PORT, SLOTKEEPER_REDIS_PORT and SLOTKEEPER_FLOWER_PORT
    set the ports; SLOTKEEPER_DATABASE_URL, SLOTKEEPER_REDIS_URL and SLOTKEEPER_BROKER_URL name servers of your own.
    """
    if not demo and (demo_jobs or exit_after_demo):
        raise click.UsageError("--no-demo does not go with --demo-jobs or --exit-after-demo.")
    from app.up.launcher import UpOptions
    from app.up.launcher import run_up as start

    sys.exit(start(UpOptions(demo, demo_jobs, exit_after_demo), _say))


def _say(line: str) -> None:
    with suppress(OSError):  # Whoever was reading may have gone.
        echo(line)


@click.command()
def flower() -> None:
    """Run Flower, with the password kept in SLOTKEEPER_HOME.

    As `celery -A tasks flower`, but closed: on 127.0.0.1, with a password, with bounded memory.  Flower's own
    variables (FLOWER_BASIC_AUTH, FLOWER_ADDRESS, FLOWER_MAX_TASKS, ...) are obeyed.
    """
    from app.up.installation_folder import flower_password
    from app.up.roles import UpSettings, read_settings
    from slotkeeper.config import StorageSettings
    from slotkeeper.garbage import tune_garbage_collection

    defaults = {
        "FLOWER_ADDRESS": "127.0.0.1",
        "FLOWER_PORT": str(read_settings(UpSettings).flower_port),
        "FLOWER_MAX_TASKS": "10000",
        "FLOWER_MAX_WORKERS": "200",
        "FLOWER_PERSISTENT": "false",
    }
    # Not on the command line: the list of processes is open to everybody.
    if "FLOWER_BASIC_AUTH" not in os.environ and "FLOWER_AUTH" not in os.environ:
        defaults["FLOWER_BASIC_AUTH"] = f"slotkeeper:{flower_password(read_settings(StorageSettings).home)}"
    os.environ.update({name: value for name, value in defaults.items() if name not in os.environ})

    from tasks.__main__ import run
    from tasks.celery_app import celery

    _close_flower()
    tune_garbage_collection()
    celery.conf.include = ["tasks.extensions.signal_handlers"]  # It shows tasks, and runs none.
    celery.conf.broker_transport = None  # Its page of the broker goes by the scheme of the URL.
    run(["flower"])


def _close_flower() -> None:
    """Flower shows /metrics and /healthcheck to everybody; behind its password they tell nobody else."""
    from flower.views.monitor import Healthcheck, Metrics
    from tornado.web import authenticated

    for view in (Metrics, Healthcheck):
        view.get = authenticated(view.get)


@click.command()
@click.option("--to", "revision", metavar="REVISION", help="Go to this schema instead, also back to an older one.")
def migrate(revision: str | None) -> None:
    """Bring the database's schema to what this release needs.

    With --to, before an older release is installed: go back to the schema that the older release needs.  Columns that
    came later are dropped with their content, so back up first.
    """
    from migrations.migrate import migrate_to, upgrade
    from slotkeeper.config import StorageSettings
    from slotkeeper.state_folder import make_private_folder

    settings = StorageSettings()
    with _said():
        if not settings.database_url:
            make_private_folder(settings.home)
        if revision is None:
            upgrade(settings.sqlalchemy_url)
        else:
            migrate_to(settings.sqlalchemy_url, revision)
    echo("The database has the schema " + (revision or "that this release needs") + ".")


@click.group()
def tenants() -> None:
    """Who may submit and who may administer.

    add, change, rotate, list and remove work on the record itself; pause, drain, freeze and resume ask the API, as it
    takes effect at once everywhere.
    """


@tenants.command("list")
@json_option
def list_tenants(as_json: bool) -> None:
    """List the tenants that have a key, and those that are paused, draining or frozen."""
    with _said():
        found = {it.name: it for it in _tenants().list_all()}
        states = _states()
    facts = ("admin", "rate_per_s", "burst")
    listed = [
        {
            "name": name,
            **{fact: getattr(found.get(name), fact, None) for fact in facts},
            "state": states.get(name, "online"),
        }
        for name in sorted(found.keys() | states.keys())
    ]
    if as_json:
        print_json(listed)
        return
    titles = ("name", "admin", "submits per s", "at once", "state")
    print_table(titles, (list(one.values()) for one in listed), "There are no tenants.")


@tenants.command("add")
@click.argument("name")
@click.option("--admin", is_flag=True, help="May administer, too.")
@click.option("--audit", is_flag=True, help="May see who did what, without administering.")
@click.option("--rate", type=click.IntRange(min=1), help="Submits per second.  [default: no limit]")
@click.option("--burst", type=click.IntRange(min=1), help="Submits at once.")
@json_option
def add_tenant(name: str, admin: bool, audit: bool, rate: int | None, burst: int | None, as_json: bool) -> None:
    """Add a tenant and print its key, which cannot be read again."""
    from slotkeeper.clock import now_ms
    from slotkeeper.registry.tenants import Tenant

    if burst is not None and rate is None:
        raise click.UsageError("--burst goes with --rate.")
    with _said():
        key = _tenants().add(Tenant(name, admin, rate, burst, audit), now_ms())
    if as_json:
        print_json({"name": name, "key": key})
        return
    echo(key)
    echo("Keep it: it cannot be read again.  SLOTKEEPER_REQUIRE_KEYS=true makes the API ask for keys.", err=True)


@tenants.command("change")
@click.argument("name")
@click.option("--rate", type=click.IntRange(0, 1_000_000), help="Submits per second; 0: no limit.")
@click.option("--burst", type=click.IntRange(0, 1_000_000), help="Submits at once; 0: as many as --rate says.")
def change_tenant(name: str, rate: int | None, burst: int | None) -> None:
    """Change a tenant's limits.  They hold within seconds; its key and its webhooks stay."""
    limits = {fact: value or None for fact, value in (("rate_per_s", rate), ("burst", burst)) if value is not None}
    if not limits:
        raise click.UsageError("Give --rate, --burst or both.")
    with _said():
        _tenants().change(name, limits)
    echo(f"{escape_line(name)} is changed.")


@tenants.command("rotate")
@click.argument("name")
@click.option(
    "--overlap", default="0s", metavar="TIME", help="The key before is valid for so long, such as 30min or 1h."
)
@json_option
def rotate_key(name: str, overlap: str, as_json: bool) -> None:
    """Give a tenant a new key and print it.  It is valid at once; it cannot be read again.

    The key before stops working within seconds, or when --overlap is over.  Rotated again before that, only the two
    latest keys are valid.
    """
    from slotkeeper.clock import now_ms

    overlap_s = _seconds(overlap)
    with _said():
        key = _tenants().rotate_key(name, overlap_s * 1000, now_ms())
    if as_json:
        print_json({"name": name, "key": key, "overlap_s": overlap_s})
        return
    echo(key)
    echo(f"Keep it: it cannot be read again.  The key before is valid for {overlap} more.", err=True)


def _seconds(duration: str) -> int:
    """Return the seconds of a duration such as 90s, 30min, 1h or 2d.  Raises UsageError."""
    parts = re.fullmatch("([0-9]{1,7})(s|min|h|d)", duration)
    seconds = int(parts[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86_400}[parts[2]] if parts else None
    if seconds is None or seconds > 30 * 86_400:
        raise click.UsageError(f"--overlap {duration!r} is no time of at most 30d; write it as 90s, 30min, 1h or 2d.")
    return seconds


@tenants.command("remove")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove_tenant(name: str, yes: bool) -> None:
    """Remove a tenant: its key stops working, and its webhooks are deleted.

    It says what the tenant has, and asks.  Jobs stay, and those that wait go on.
    """
    from slotkeeper.outbox.subscriptions import delete_of_tenant

    with _said():
        found = _tenants()
        if all(one.name != name for one in found.list_all()):
            raise NotFound(f"There is no tenant {name!r}.")
        holds = _holdings(name)
    echo(f"{escape_line(name)} has {holds}. Its keys stop working, its webhooks are deleted, its jobs go on.", err=True)
    if not yes:
        click.confirm("Remove it?", abort=True, err=True)
    with _said():
        found.remove(name, also=delete_of_tenant)
    echo(f"{escape_line(name)} is removed.")


def _holdings(name: str) -> str:
    """Say what a tenant has."""
    from routing.queries.holdings import count_tenant_holdings
    from tasks.services import database

    has = count_tenant_holdings(database(), name)
    jobs = ", ".join(f"{count} {state}" for state, count in has.active.items()) or "none"
    return f"jobs that have not ended: {jobs}; webhooks: {has.webhooks}"


def _states() -> dict[str, str]:
    """Of those tenants that do not stand online."""
    from tasks.services import catalog

    return {name: it.state for name, it in catalog().read().tenants.items()}


def _tenants():  # type: ignore[no-untyped-def]
    from migrations.migrate import check
    from slotkeeper.registry.tenants import Tenants
    from tasks.services import database

    if missing := check(database().url):
        raise click.ClickException(missing)
    return Tenants(database())


@contextmanager
def _said() -> Iterator[None]:
    """Errors of the record and wrong settings, in one line.  What is changed is done by whoever is at the terminal."""
    import getpass
    import socket

    from pydantic import ValidationError

    from slotkeeper import logs
    from slotkeeper.audit import acts
    from slotkeeper.errors import SlotkeeperError

    logs.configure()
    try:
        with acts.acting_as(acts.Actor(getpass.getuser(), "command line", socket.gethostname())):
            yield
    except SlotkeeperError as error:
        raise click.ClickException(error.detail) from error
    except (ValidationError, ValueError, OSError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error


def _serve() -> click.Command:
    from slotkeeper.serve.__main__ import main

    return main


state_commands.add_state_commands(tenants, "tenant")

COMMANDS = (up, _serve(), migrate, tenants, flower)
