"""One process's Dispatcher, put together from the settings on first use."""

from pathlib import Path
from typing import TYPE_CHECKING

from routing.admission.admission import Admission
from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance import pulse
from routing.queries.estimates import Estimates
from routing.queries.forecasts import Forecasts
from routing.queries.processes import Processes
from routing.queries.said import Telling
from routing.queries.tallies import Tallies
from routing.queue.config import RoutingSettings
from routing.queue.leases import Leases
from routing.queue.queues import Queues
from routing.queue.slots import Slots
from routing.queue.workers import Workers
from slotkeeper.config import RecordSettings
from slotkeeper.db.db import Database
from slotkeeper.errors import RecordUnavailable
from slotkeeper.home import open_home
from slotkeeper.jobs.store import Store
from slotkeeper.lifetimes import Lifetimes
from slotkeeper.once import once
from slotkeeper.outbox.tellings import Tellings
from slotkeeper.redis.keys import Keys
from slotkeeper.redis.scripts import Scripts, connect
from slotkeeper.registry.cache import CatalogCache
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.rotations import Rotations
from tasks.aside import Aside
from tasks.config import TaskSettings
from tasks.outbound import check_url, parse_allow

if TYPE_CHECKING:
    from tasks.telling import Teller

_TOGETHER_S = 0.02  # Promises of so long a time are remembered together; most jobs that wait start later.


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
def leases() -> Leases:
    return Leases(scripts(), RoutingSettings(), workers().room)


@once
def workers() -> Workers:
    return Workers(scripts())


@once
def lifetimes() -> Lifetimes:
    """Of workers, by the owner of their leases."""
    return Lifetimes(RecordSettings().home.absolute() / "workers")


@once
def processes() -> Processes:
    return Processes(scripts())


@once
def last_runs() -> pulse.LastRuns:
    return pulse.LastRuns(scripts())


@once
def tallies() -> Tallies:
    return Tallies(scripts())


@once
def telling() -> Telling:
    return Telling(scripts())


@once
def catalog_cache() -> CatalogCache:
    return CatalogCache(catalog(), RoutingSettings().catalog_refresh_s)


@once
def estimates() -> Estimates:
    forecasts = Forecasts(scripts())
    forecasts.remember_by(Aside("promises", forecasts.remember, _TOGETHER_S).ask)
    return Estimates(catalog_cache(), forecasts)


@once
def store() -> Store:
    return Store(database(), RecordSettings().idempotency_window_s)


@once
def teller() -> "Teller":
    from tasks.telling import Teller  # Loads Celery, which not every process has a use for.

    return Teller(Tellings(database()), store())


@once
def dispatcher() -> Dispatcher:
    from tasks.announce import CeleryAnnouncer  # As above.

    settings = RoutingSettings()
    queues = Queues(scripts(), settings, workers().room)
    allow = parse_allow(TaskSettings().webhook_allow)
    return Dispatcher(
        store=store(),
        catalog=catalog_cache(),
        queues=queues,
        leases=leases(),
        slots=Slots(scripts(), settings),
        admission=Admission(queues, catalog_cache(), estimates(), settings, tallies().refused),
        observer=estimates(),
        settings=settings,
        announcer=CeleryAnnouncer(store(), teller()),
        check_url=lambda url: check_url(url, allow),
    )
