"""Commands that work on this machine: on its processes, and on the record itself."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

from cli import standing
from cli.common import json_option, print_json, print_table
from client.terminal import one_line, say


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
    from local.launcher import Wishes
    from local.launcher import up as start

    sys.exit(start(Wishes(demo, demo_jobs, exit_after_demo), _say))


def _say(line: str) -> None:
    with suppress(OSError):  # Whoever was reading may have gone.
        say(line)


@click.command()
def flower() -> None:
    """Run Flower, with the password kept in SLOTKEEPER_HOME.

    As `celery -A tasks flower`, but closed: on 127.0.0.1, with a password, with bounded memory.  Flower's own
    variables (FLOWER_BASIC_AUTH, FLOWER_ADDRESS, FLOWER_MAX_TASKS, ...) are obeyed.
    """
    from foundation.config import RecordSettings
    from foundation.garbage import collect_rarely
    from local.home import flower_password
    from local.plan import UpSettings, read_settings

    defaults = {
        "FLOWER_ADDRESS": "127.0.0.1",
        "FLOWER_PORT": str(read_settings(UpSettings).flower_port),
        "FLOWER_MAX_TASKS": "10000",
        "FLOWER_MAX_WORKERS": "200",
        "FLOWER_PERSISTENT": "false",
    }
    # Not on the command line: the list of processes is open to everybody.
    if "FLOWER_BASIC_AUTH" not in os.environ and "FLOWER_AUTH" not in os.environ:
        defaults["FLOWER_BASIC_AUTH"] = f"slotkeeper:{flower_password(read_settings(RecordSettings).home)}"
    os.environ.update({name: value for name, value in defaults.items() if name not in os.environ})

    from tasks.__main__ import run
    from tasks.celery_app import celery

    _close_flower()
    collect_rarely()
    celery.conf.include = ["tasks.signals"]  # It shows tasks, and runs none.
    run(["flower"])


def _close_flower() -> None:
    """Flower shows /metrics and /healthcheck to everybody; behind its password they tell nobody else."""
    from flower.views.monitor import Healthcheck, Metrics
    from tornado.web import authenticated

    for view in (Metrics, Healthcheck):
        view.get = authenticated(view.get)


@click.command()
def migrate() -> None:
    """Bring the schema of the record to what this release needs."""
    from foundation.config import RecordSettings
    from foundation.home import private_folder
    from migrations.migrate import upgrade

    settings = RecordSettings()
    with _said():
        if not settings.database_url:
            private_folder(settings.home)
        upgrade(settings.record_url)
    say("The record has the schema that this release needs.")


@click.group()
def tenants() -> None:
    """Who may submit and who may administer.

    add, list and remove work on the record itself; pause, drain, freeze and resume ask the API, as it takes effect at
    once everywhere.
    """


@tenants.command("list")
@json_option
def list_tenants(as_json: bool) -> None:
    """List the tenants that have a key, and those that are paused, draining or frozen."""
    with _said():
        found = {it.name: it for it in _tenants().all()}
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
    from jobs.record import now_ms
    from registry.tenants import Tenant

    if burst is not None and rate is None:
        raise click.UsageError("--burst goes with --rate.")
    with _said():
        key = _tenants().add(Tenant(name, admin, rate, burst, audit), now_ms())
    if as_json:
        print_json({"name": name, "key": key})
        return
    say(key)
    say("Keep it: it cannot be read again.  SLOTKEEPER_REQUIRE_KEYS=true makes the API ask for keys.", err=True)


@tenants.command("remove")
@click.argument("name")
def remove_tenant(name: str) -> None:
    """Remove a tenant; its key stops working."""
    from outbox.receivers import forget_tenant

    with _said():
        _tenants().remove(name, also=forget_tenant)
    say(f"{one_line(name)} is removed.")


def _states() -> dict[str, str]:
    """Of those tenants that do not stand online."""
    from tasks.wiring import catalog

    return {name: it.state for name, it in catalog().snapshot().tenants.items()}


def _tenants():  # type: ignore[no-untyped-def]
    from migrations.migrate import check
    from registry.tenants import Tenants
    from tasks.wiring import database

    if missing := check(database().url):
        raise click.ClickException(missing)
    return Tenants(database())


@contextmanager
def _said() -> Iterator[None]:
    """Errors of the record and wrong settings, in one line.  What is changed is done by whoever is at the terminal."""
    import getpass
    import socket

    from pydantic import ValidationError

    from audit import acts
    from foundation import logs
    from foundation.errors import SlotkeeperError

    logs.configure()
    try:
        with acts.acting(acts.Actor(getpass.getuser(), "command line", socket.gethostname())):
            yield
    except SlotkeeperError as error:
        raise click.ClickException(error.detail) from error
    except (ValidationError, ValueError, OSError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error


def _serve() -> click.Command:
    from reference_server.__main__ import main

    return main


standing.add_to(tenants, "tenant")

COMMANDS = (up, _serve(), migrate, tenants, flower)
