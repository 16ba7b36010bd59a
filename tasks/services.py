"""The process's database, Redis scripts, catalog and dispatcher, made from the settings on first use."""

from pathlib import Path
from typing import TYPE_CHECKING

from routing.admission.admission import Admission
from routing.config import RoutingSettings
from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance import task_runs
from routing.progress import ProgressCommands
from routing.queries.process_counters import ProcessCounters
from routing.queries.process_list import ProcessList
from routing.queue.fleets import Fleets
from routing.queue.leases import Leases
from routing.queue.queues import Queues
from routing.queue.slots import Slots
from routing.queue.worker_capacity import WorkerCapacity
from routing.scripts import make_scripts
from slotkeeper.config import StorageSettings
from slotkeeper.db import Database
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs.batches import Batches
from slotkeeper.jobs.store import JobStore
from slotkeeper.outbox.result_notifications import ResultNotifications
from slotkeeper.process import singleton
from slotkeeper.process_locks import ProcessLocks
from slotkeeper.redis.connections import connect
from slotkeeper.redis.keys import Keys
from slotkeeper.redis.scripts import Scripts
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.catalog_cache import CatalogCache
from slotkeeper.registry.credit_accounts import CreditAccounts
from slotkeeper.registry.nodes import Nodes
from slotkeeper.registry.usage import SlotTimes
from slotkeeper.registry.validations import Validations
from slotkeeper.registry.webhook_rotations import SecretRotations
from slotkeeper.state_folder import restrict_state_folder
from tasks.config import TaskSettings
from tasks.security.url_guard import check_url, parse_networks
from tasks.servers.node_description import node_description

if TYPE_CHECKING:
    from tasks.results import ResultNotifier


@singleton
def database() -> Database:
    """Return the database of this installation.

    Raises DatabaseUnavailable: there is no such SQLite file; only `migrate` creates it.
    """
    settings = StorageSettings()
    url = settings.sqlalchemy_url
    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not path.exists():
        raise DatabaseUnavailable(
            f"There is no Slotkeeper record at {path}: set SLOTKEEPER_HOME to the state folder of your installation, "
            "or SLOTKEEPER_DATABASE_URL; for a new one run `slotkeeper migrate`."
        )
    restrict_state_folder(settings)
    return Database(url)


@singleton
def catalog() -> Catalog:
    return Catalog(database())


@singleton
def secret_rotations() -> SecretRotations:
    return SecretRotations(database())


@singleton
def scripts() -> Scripts:
    settings = RoutingSettings()
    return make_scripts(connect(settings.effective_redis_url, settings.redis_timeout_s), Keys(settings.redis_prefix))


@singleton
def leases() -> Leases:
    return Leases(scripts(), RoutingSettings(), workers().total)


@singleton
def workers() -> WorkerCapacity:
    return WorkerCapacity(scripts())


@singleton
def process_locks() -> ProcessLocks:
    """Return the locks of the worker processes, by the owner of their leases."""
    return ProcessLocks(StorageSettings().home.absolute() / "workers")


@singleton
def processes() -> ProcessList:
    return ProcessList(scripts())


@singleton
def task_run_recorder() -> task_runs.TaskRunRecorder:
    return task_runs.TaskRunRecorder(scripts())


@singleton
def process_counters() -> ProcessCounters:
    return ProcessCounters(scripts())


@singleton
def progress_scripts() -> ProgressCommands:
    return ProgressCommands(scripts())


@singleton
def catalog_cache() -> CatalogCache:
    return CatalogCache(catalog(), RoutingSettings().catalog_refresh_s)


@singleton
def store() -> JobStore:
    return JobStore(database(), StorageSettings().idempotency_window_s)


@singleton
def batches() -> Batches:
    return Batches(database())


@singleton
def validations() -> Validations:
    return Validations(database())


@singleton
def nodes() -> Nodes:
    return Nodes(catalog(), node_description())


@singleton
def credit_accounts() -> CreditAccounts:
    return CreditAccounts(database())


@singleton
def result_notifier() -> "ResultNotifier":
    from tasks.results import ResultNotifier  # Here, since it loads Celery (20 MiB), which not every process needs.

    return ResultNotifier(ResultNotifications(database()), store())


@singleton
def dispatcher() -> Dispatcher:
    from tasks.results import CeleryNotifier  # As above.

    settings = RoutingSettings()
    queues = Queues(scripts(), settings, workers().total)
    slot_times = SlotTimes(database())
    allow = parse_networks(TaskSettings().webhook_allow)
    return Dispatcher(
        store=store(),
        catalog=catalog_cache(),
        queues=queues,
        leases=leases(),
        slots=Slots(scripts(), settings),
        fleets=Fleets(scripts(), settings),
        admission=Admission(queues, settings, slot_times, process_counters().count_refusal),
        settings=settings,
        notifier=CeleryNotifier(store(), result_notifier()),
        check_url=lambda url: check_url(url, allow),
    )
