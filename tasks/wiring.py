"""One process's Dispatcher, put together from the settings on first use."""

from pathlib import Path

from insight.estimates import Estimates
from insight.forecasts import Forecasts
from jobs.catalog import Catalog
from jobs.config import RecordSettings
from jobs.db import Database
from jobs.errors import RecordUnavailable
from jobs.home import open_home
from jobs.once import once
from jobs.rotations import Rotations
from jobs.store import Store
from routing.admission import Admission
from routing.config import RoutingSettings
from routing.dispatcher import Dispatcher
from routing.fleet import Fleet
from routing.keys import Keys
from routing.queues import Queues
from routing.scripts import Scripts, connect
from routing.slots import Slots
from routing.workers import Workers
from tasks.config import TaskSettings
from tasks.outbound import check_url, parse_allow
from tasks.releases import PatientLeases


@once
def database() -> Database:
    """The record of this installation.  Raises RecordUnavailable where there is none: only `migrate` makes one."""
    settings = RecordSettings()
    url = settings.record_url
    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not path.exists():
        raise RecordUnavailable(
            f"There is no Slotkeeper record at {path}: set SLOTKEEPER_HOME to the state folder of your installation, "
            "or SLOTKEEPER_DATABASE_URL; for a new one run `slotkeeper migrate`."
        )
    open_home(settings)
    return Database(url)


@once
def catalog() -> Catalog:
    return Catalog(database())


@once
def rotations() -> Rotations:
    return Rotations(database())


@once
def scripts() -> Scripts:
    settings = RoutingSettings()
    return Scripts(connect(settings.room_url, settings.redis_timeout_s), Keys(settings.redis_prefix))


@once
def leases() -> PatientLeases:
    return PatientLeases(scripts(), RoutingSettings(), workers().room)


@once
def workers() -> Workers:
    return Workers(scripts())


@once
def fleet() -> Fleet:
    return Fleet(catalog(), RoutingSettings().catalog_refresh_s)


@once
def estimates() -> Estimates:
    return Estimates(fleet(), Forecasts(scripts()))


@once
def dispatcher() -> Dispatcher:
    from tasks.announce import CeleryAnnouncer

    settings, record = RoutingSettings(), RecordSettings()
    queues = Queues(scripts(), settings, workers().room)
    allow = parse_allow(TaskSettings().webhook_allow)
    return Dispatcher(
        store=Store(database(), record.idempotency_window_s),
        fleet=fleet(),
        queues=queues,
        leases=leases(),
        slots=Slots(scripts(), settings),
        admission=Admission(queues, fleet(), estimates(), settings),
        observer=estimates(),
        settings=settings,
        announcer=CeleryAnnouncer(),
        check_url=lambda url: check_url(url, allow),
    )
