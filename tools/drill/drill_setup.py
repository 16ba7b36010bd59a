"""The cluster that a drill runs on: its servers, what its faults need, and what they can hit."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.up import ports
from app.up.errors import UpError
from slotkeeper.client import Client
from slotkeeper.client_errors import ClientError
from slotkeeper.registry.identity import LOCAL_IDENTITY
from tools.cluster import process_clocks
from tools.cluster.cluster import NODE_POOL, POSTGRESQL, SQLITE, Cluster, ClusterSpec, ServerSpec
from tools.drill.drill_model import STARTS
from tools.drill.fault_schedule import OUTSIDE, Kind, targets
from tools.drill.node_model import JOURNAL

_PRICE, _GRANTED = 10_000, 10**15  # micro-credits, for a second and in all
# Jobs that random kills hit several times must not be taken for jobs that crash their servers.
_COMMON_CONFIG: dict[str, object] = {"max_crashes": 100}
_CONFIGS: Mapping[str, dict[str, object]] = {
    "sync": {},
    # Runs are shorter than the default of two seconds between polls.
    "async": {"model_type": "async", "poll_interval": 0.2},
    # Its health check counts runs and does not name their jobs, as with most servers.
    # Shorter than the faults that keep a node away, so that some runs are lost.
    "node": {"node_pools": [NODE_POOL], "poll_interval": 0.2, "node_patience": 20.0},
    "plain": {"description": {"mode": "sync", "health": {"job_ids": None}, "cancel": None}},
}


def cluster_spec(
    kinds: Sequence[Kind],
    workers: int = 2,
    database: str = SQLITE,
    seed: int = 0,
    receiver_port: int | None = None,
) -> ClusterSpec:
    """Return a cluster that is ready for these kinds of faults.  `receiver_port`: where webhooks are received."""
    chosen = set(kinds)
    return ClusterSpec(
        workers,
        database,
        has_proxy=bool(OUTSIDE & chosen),
        has_replica=bool({Kind.STALE, Kind.FAILOVER} & chosen),
        has_clocks=bool({Kind.CLOCK, Kind.STEP} & chosen),
        has_unread_log=Kind.UNREAD in chosen,
        receiver_port=receiver_port if Kind.RECEIVERS in chosen else None,
        seed=seed,
    )


def server_specs(home: Path, slots: int = 8) -> list[ServerSpec]:
    """Return four servers of three models that have `slots` slots together, at least 4; and a node with two."""
    quarter = slots // 4
    return [
        _server(home, "sync-1", "sync", quarter),
        _server(home, "sync-2", "sync", quarter),
        _server(home, "async-1", "async", slots - 2 * quarter - 1),
        _server(home, "plain-1", "plain", 1),
        _node(home, "node-1", "node", 2),
    ]


def open_account(url: str) -> None:
    """Let all jobs of the drill cost something.  Raises UpError."""
    client, tenant = Client(url), LOCAL_IDENTITY.tenant.name
    try:
        client.request("PUT", "/admin/prices", body={"prices": [{"per_slot_s": _PRICE}]})
        client.request("PUT", f"/admin/tenants/{tenant}/credit-account", body={})
        grant = {"kind": "grant", "amount": _GRANTED, "reason": "drill"}
        client.post(f"/admin/tenants/{tenant}/credits", grant, {"Idempotency-Key": "drill"})
    except ClientError as error:
        raise UpError(f"The account could not be opened: {error}") from error


def journal_path(home: Path, server: str) -> Path:
    """Return the file that has a line for each run that has ended."""
    return home / f"{server}.journal"


def starts_path(home: Path, server: str) -> Path:
    """Return the file that has a line for each run that has begun."""
    return home / f"{server}.starts"


def possible_targets(cluster: Cluster) -> dict[Kind, Sequence[str]]:
    """Return the possible targets of each kind of fault."""
    valkeys = [name for name in cluster.valkeys() if name != "replica"]
    proxied = [name for name in cluster.proxied_names() if name != "receivers"]
    # A node registers itself: its slots and its removal are not an operator's.
    models = sorted({server.model for server in cluster.servers if not server.is_node})
    servers = [server.name for server in cluster.servers]
    databases = ["database"] * cluster.spec.owns_postgres
    return targets(cluster.workers, servers, models, cluster.helpers, valkeys, proxied, databases)


def unavailable_reason(kind: Kind, database: str) -> str | None:
    """Return why this kind of fault cannot happen here; None: it can."""
    match kind:
        case Kind.COMMITS if database == SQLITE:
            return "SQLite has no connection that could lose the answer to a COMMIT; use --database postgresql"
        case Kind.DATABASE if database == SQLITE:
            return "SQLite has no process that could be killed; use --database postgresql"
        case Kind.DATABASE if database != POSTGRESQL:
            return "the drill kills only a database that it has started itself"
        case Kind.CLOCK | Kind.STEP if process_clocks.library() is None:
            return "libfaketime is not installed (Debian: apt-get install faketime)"
    return None


def _node(home: Path, name: str, model: str, slots: int) -> ServerSpec:
    """Return a node, whose agent connects to the gateway."""
    command = (
        f'env {STARTS}="{starts_path(home, name)}" {JOURNAL}="{journal_path(home, name)}" '
        f'"{sys.executable}" -P -m slotkeeper.agent run --grace 1'
    )
    config = _COMMON_CONFIG | _CONFIGS[model]
    return ServerSpec(name, model, slots, 0, command, config, node_function="tools.drill.node_model:work")


def _server(home: Path, name: str, model: str, slots: int) -> ServerSpec:
    """Return a server of a model of this kind; "plain": it ignores idempotency keys (plain_server.py)."""
    port, journal, starts = ports.free_port(), journal_path(home, name), starts_path(home, name)
    if model == "plain":
        command = f'"{sys.executable}" -m tools.drill.plain_server {port} "{journal}" "{starts}"'
    else:
        command = (
            f'env {STARTS}="{starts}" "{sys.executable}" -m slotkeeper.serve tools.drill.drill_model:work'
            f"{' --async' if model == 'async' else ''} --grace 1"
            f' --slots {slots} --port {port} --journal "{journal}"'
        )
    return ServerSpec(name, model, slots, port, command, _COMMON_CONFIG | _CONFIGS[model])
