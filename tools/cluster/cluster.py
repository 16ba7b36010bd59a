"""A whole Slotkeeper in a folder of its own, whose processes can be killed, stopped and started again."""

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal

import psycopg
from redis import Redis
from sqlalchemy import make_url

from app.up import ports, valkey_server
from app.up.errors import UpError
from app.up.guardian import Guardian
from app.up.managed_process import ManagedProcess, Role
from app.up.roles import read_procfile
from migrations import migrate
from slotkeeper.client import Client, ClientError
from slotkeeper.db import Database
from slotkeeper.jobs import ledger
from tools.cluster import postgres_server, process_clocks
from tools.cluster.protocol_filters import BrokerMessages, LostCommits
from tools.cluster.tcp_proxy import Proxy, ProxyPort
from tools.drill.drill_model import STARTS
from tools.drill.fault_schedule import Fault, Kind, targets
from tools.drill.setting import DrillSetup

GRACE_S = 7.0
UNREAD = "maintenance"
"""The process whose log nobody reads, in a drill with that fault: it logs the end of each job."""
_START_S = 60.0
_STOP_S = 15.0
_LOOK_S = 0.05
_REDIS_S = 5
# Whoever kills at random must not take the jobs that were hit for poison.
_CONFIG: dict[str, object] = {"max_crashes": 100}
_ELSEWHERE = frozenset({"worker", "web", "beat", "flower"})
_STORES = frozenset({"redis", "replica", "broker", "database"})


_CONFIG_OF: Mapping[str, dict[str, object]] = {
    "sync": {},
    # Runs that are short beside the default two seconds between polls.
    "async": {"model_type": "async", "poll_interval": 0.2},
    # A health check that counts runs and names none, as most servers have it.
    "plain": {"description": {"mode": "sync", "health": {"job_ids": None}, "cancel": None}},
}


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One inference server."""

    name: str
    model: str
    slots: int
    port: int
    kind: Literal["sync", "async", "plain"]
    """plain: it knows no keys (tools/drill/plain_server.py); the others are the reference server."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def config(self) -> dict[str, object]:
        """Of its model."""
        return _CONFIG | _CONFIG_OF[self.kind]


def server_plans(slots: int = 8) -> list[ServerSpec]:
    """Four servers for three models, with at least 4 `slots` among them."""
    quarter = slots // 4
    return [
        ServerSpec("sync-1", "sync", quarter, ports.free_port(), "sync"),
        ServerSpec("sync-2", "sync", quarter, ports.free_port(), "sync"),
        ServerSpec("async-1", "async", slots - 2 * quarter - 1, ports.free_port(), "async"),
        ServerSpec("plain-1", "plain", 1, ports.free_port(), "plain"),
    ]


def operated(fault: Fault, servers: Sequence[ServerSpec]) -> ServerSpec:
    """The server that an operator deals with, of the model that the fault is about.

    Models are what excludes each other: whoever resumes one ends everybody's pause of it.
    """
    return Random(repr(fault)).choice([server for server in servers if server.model == fault.target])


class Cluster:
    """Starts everything when entered, ends everything when left.  One thread at a time may use it.

    Processes reach each other by doors of `proxy` where the setting wants any; the drill itself goes past them.
    """

    def __init__(
        self, home: Path, guardian: Guardian, proxy: Proxy, setting: DrillSetup, receiver_port: int | None = None
    ) -> None:
        self.home, self.logs = home, home / "logs"
        self.setting = setting
        self._guardian, self._proxy = guardian, proxy
        self.workers = tuple(f"worker-{n}" for n in range(1, setting.workers + 1))
        self._commands = read_procfile()
        self.helpers = tuple(name for name in self._commands if name not in _ELSEWHERE)
        self.servers = server_plans(setting.slots)
        self._ports = {name: ports.free_port() for name in ("web", *self._valkeys(), "database")}
        self._ports |= {server.name: server.port for server in self.servers}
        if receiver_port is not None:
            self._ports["receivers"] = receiver_port
        self._room = ["redis", "replica"]  # the child that is the room's Redis now, and the other
        self.url = f"http://127.0.0.1:{self._ports['web']}"
        self.commits = LostCommits(Random(f"{setting.seed} commits"))
        self.broker_messages = BrokerMessages(Random(f"{setting.seed} messages"))
        self.proxy_ports: dict[str, ProxyPort] = {}
        self._children: dict[str, ManagedProcess] = {}
        self._down: set[str] = set()
        self.crashes: list[str] = []
        """What ended although nobody killed it."""
        self.revoked: set[str] = set()
        """Jobs that were, by Celery."""
        self.refuse_deliveries: Callable[[float], None] = lambda share: None
        """Have the receivers refuse this share of the webhook messages."""
        self.clocked = (*self.workers, *self.helpers, "beat", "web")
        self._unread: int | None = None  # the pipe that takes the log of UNREAD

    def journal(self, server: str) -> Path:
        return self.home / f"{server}.journal"

    def starts(self, server: str) -> Path:
        return self.home / f"{server}.starts"

    # -- where everything is -------------------------------------------------------------------------------

    @property
    def database_url(self) -> str:
        """The database, past every door."""
        if self.setting.owns_postgres:
            return postgres_server.url(self._ports["database"])
        return self.setting.database if self.setting.has_postgres else f"sqlite:///{self.home / 'record.db'}"

    @property
    def redis_url(self) -> str:
        """The room, by its door: it leads to the right one after a failover."""
        return f"redis://127.0.0.1:{self._port('redis')}/0"

    @property
    def broker_url(self) -> str:
        """The broker, past its door."""
        return f"redis://127.0.0.1:{self._ports['broker' if self.setting.has_proxy else 'redis']}/0"

    def endpoint(self, server: ServerSpec) -> str:
        port = self.proxy_ports[server.name].port if server.name in self.proxy_ports else server.port
        return f"http://127.0.0.1:{port}/generate"

    def receiver_url(self, number: int) -> str:
        """Where the end of job `number` is told."""
        return f"http://127.0.0.1:{self._port('receivers')}/{number}"

    def targets(self) -> dict[Kind, Sequence[str]]:
        """What each kind of fault can happen to."""
        valkeys = [name for name in self._valkeys() if name != "replica"]
        reached = [name for name in self._reached() if name != "receivers"]
        models = sorted({server.model for server in self.servers})
        servers = [server.name for server in self.servers]
        databases = ["database"] * self.setting.owns_postgres
        return targets(self.workers, servers, models, self.helpers, valkeys, reached, databases)

    def _port(self, name: str) -> int:
        return self.proxy_ports[name].port if name in self.proxy_ports else self._ports[name]

    def _valkeys(self) -> list[str]:
        setting = self.setting
        return ["redis"] + ["replica"] * setting.has_replica + ["broker"] * setting.has_proxy

    def _reached(self) -> list[str]:
        """What is reached by a door."""
        if not self.setting.has_proxy:
            return []
        database = ["database"] * self.setting.has_postgres
        receivers = ["receivers"] * ("receivers" in self._ports)
        return ["redis", "broker", *database, *(server.name for server in self.servers), *receivers]

    # -- starting and ending -------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises UpError."""
        self.start_stores()
        self._prepare_record()
        for role in self._roles():
            self._make(role)
            self._launch(role.name)
        client = Client(self.url)
        self._wait(lambda: _ready(client), "The API did not become ready")
        for server in self.servers:
            self._wait(lambda port=server.port: ports.is_open("127.0.0.1", port), f"{server.name} does not listen")  # type: ignore[misc]
        for server in self.servers:
            self.register(server)

    def start_stores(self) -> None:
        """What keeps state, and the doors.  Raises UpError."""
        for folder in (self.logs, *(self.home / name for name in self._valkeys())):
            folder.mkdir(parents=True, exist_ok=True)
        (self.home / "state").mkdir(mode=0o700)  # Its own: whoever runs PostgreSQL gets through the folder above.
        self._open_doors()
        for role in self._store_roles():
            self._make(role)
            self._launch(role.name)
        self._wait(
            lambda: all(valkey_server.is_ready(self._ports[name]) for name in self._valkeys()), "Valkey did not answer"
        )
        if self.setting.has_replica:
            self._follow(self._room[1], self._room[0])

    def stop(self) -> list[str]:
        """End everything in order; answers what had to be killed."""
        killed = []
        stores = [name for name in self._children if name in _STORES]
        for names in ([name for name in self._children if name not in _STORES], stores):
            alive = [self._children[name] for name in names if self._children[name].pid]
            for child in alive:
                self._signal(child, signal.SIGCONT)
                child.terminate()
            until = time.monotonic() + _STOP_S
            while left := [child for child in alive if self._runs(child)]:
                if time.monotonic() > until:
                    killed += [child.role.name for child in left]
                    self._end(left)
                time.sleep(_LOOK_S)
        return killed

    def end(self) -> None:
        """Kill everything at once."""
        self._end(self._children.values())
        if self._unread is not None:
            os.close(self._unread)
            self._unread = None

    def _end(self, children: Iterable[ManagedProcess]) -> None:
        ending = list(children)
        for child in ending:
            child.kill()
        for child in ending:
            while self._runs(child):
                time.sleep(_LOOK_S)

    # -- faults --------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """SIGKILL to it and all that it has started."""
        self._down.add(self._now(name))
        self._end([self._children[self._now(name)]])

    def terminate(self, name: str) -> None:
        self._down.add(name)
        self._children[name].terminate()

    def freeze(self, name: str) -> None:
        self._signal(self._children[name], signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal(self._children[name], signal.SIGCONT)

    def start_again(self, name: str) -> bool:
        """What has not ended by itself until now is killed first: True."""
        child = self._children[self._now(name)]
        killed = self._runs(child)
        self._end([child])
        self._launch(self._now(name))
        self._down.discard(self._now(name))
        return killed

    def flush(self, name: str) -> None:
        """Empty a Valkey.  Raises redis errors."""
        with self._valkey(self._now(name)) as redis:
            redis.flushall()

    def bound_memory(self, name: str, most_bytes: int) -> None:
        """Have a Valkey take no more memory than this; 0: as much as there is.  Raises redis errors."""
        with self._valkey(self._now(name)) as redis:
            redis.config_set("maxmemory", most_bytes)

    def fall_behind(self) -> bool:
        """Let the room's replica hear no more of what is written.  False: it has not heard all yet.

        Raises redis errors.
        """
        with self._valkey(self._room[1]) as replica:
            if replica.info("replication").get("master_link_status") != "up":
                return False
            replica.replicaof("NO", "ONE")
        return True

    def fail_over(self) -> None:
        """Kill the queues' Redis, and let its replica take over.  Raises UpError, redis errors."""
        old, new = self._room
        self._down.add(old)
        self._end([self._children[old]])
        self._room = [new, old]
        self.proxy_ports["redis"].redirect(("127.0.0.1", self._ports[new]))
        self._launch(old)
        self._down.discard(old)
        self._wait(lambda: valkey_server.is_ready(self._ports[old]), f"{old} did not answer")
        self._follow(old, new)

    def promote_replica(self) -> bool:
        """Promote the queues' replica.  Whoever is connected stays with the old primary, which takes writes still.

        False: the replica is not in sync yet.  Raises redis errors.
        """
        old, new = self._room
        with self._valkey(new) as replica:
            if replica.info("replication").get("master_link_status") != "up":
                return False
            replica.replicaof("NO", "ONE")
        self._room = [new, old]
        self.proxy_ports["redis"].redirect(("127.0.0.1", self._ports[new]), keeps_connections=True)
        return True

    def demote_old_primary(self) -> None:
        """Make the old primary the replica of the new one, as Sentinel does in the end.  Raises redis errors."""
        new, old = self._room
        self._follow(old, new)
        with self._valkey(old) as redis:
            redis.client_kill_filter(_type="normal", skipme=True)

    def refuse_writes(self, name: str, *, refuse: bool) -> None:
        """Have a Valkey, or PostgreSQL, answer and take no writes.  Raises redis errors, psycopg.OperationalError."""
        if name != "database":
            with self._valkey(self._now(name)) as redis:
                redis.config_set("min-replicas-to-write", 9 if refuse else 0)
            return
        url = make_url(self.database_url).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url, autocommit=True, connect_timeout=5) as admin:
            admin.execute("SET default_transaction_read_only = off")
            setting = "SET default_transaction_read_only = on" if refuse else "RESET default_transaction_read_only"
            admin.execute(f"ALTER SYSTEM {setting}")
            admin.execute("SELECT pg_reload_conf()")

    def set_clock(self, name: str, offset_s: str) -> None:
        """Let a process see a time that is `offset_s` later, such as "-30", within a second."""
        process_clocks.set_clock(self._clock(name), offset_s)

    def register(self, server: ServerSpec, slots: int | None = None) -> None:
        """Raises UpError."""
        client = Client(self.url)
        body = {"model": server.model, "server": server.name, "slots": slots or server.slots}
        try:
            client.post("/admin/register", body | {"endpoint": self.endpoint(server)})
            client.request("PUT", f"/admin/model-configs/{server.model}", body=server.config)
        except ClientError as error:
            raise UpError(f"The servers could not be registered: {error}") from error

    def restart_ended(self) -> None:
        """Start again, as a supervisor would, what has ended by itself."""
        for name, child in self._children.items():
            if name not in self._down and not self._runs(child):
                self.crashes.append(f"{name}: {child.last_log_line()}")
                self._launch(name)

    def _now(self, name: str) -> str:
        """The child that is meant: the room's Redis changes places with its replica."""
        return self._room[0] if name == "redis" else name

    def _valkey(self, name: str) -> "Redis":
        return Redis(port=self._ports[name], socket_timeout=_REDIS_S, socket_connect_timeout=_REDIS_S)

    def _follow(self, name: str, master: str) -> None:
        with self._valkey(name) as redis:
            redis.replicaof("127.0.0.1", self._ports[master])

    # -- how it is made ------------------------------------------------------------------------------------

    def _open_doors(self) -> None:
        for name in self._reached():
            door = self._proxy.open(name, self._address(name))
            if name == "broker":
                door.filter_streams(self.broker_messages.make_filter)
            if name == "database":
                door.filter_streams(self.commits.make_filter)
            self.proxy_ports[name] = door

    def _address(self, name: str) -> tuple[str, int]:
        if name == "database" and not self.setting.owns_postgres:
            given = make_url(self.setting.database)
            return given.host or "127.0.0.1", given.port or 5432
        return "127.0.0.1", self._ports[name]

    def _store_roles(self) -> list[Role]:
        program = valkey_server.find_valkey()
        roles = [
            replace(valkey_server.valkey_role(program, self._ports[name], self.home / name, 1), name=name)
            for name in self._valkeys()
        ]
        if self.setting.owns_postgres:
            self.home.chmod(0o711)  # Whoever runs PostgreSQL must get to its folder.
            programs = postgres_server.prepare(self.home / "postgres")
            role = postgres_server.role(programs, self.home / "postgres", self._ports["database"], 1)
            roles.append(replace(role, name="database"))
        return roles

    def _prepare_record(self) -> None:
        """Raises UpError."""
        if self.setting.owns_postgres:
            self._wait(lambda: postgres_server.answers(self._ports["database"]), "PostgreSQL did not answer")
        migrate.upgrade(self.database_url)
        database = Database(self.database_url)
        try:
            if ledger.read(database).accepted:
                raise UpError("The database has jobs already: give --database the URL of an empty one.")
        finally:
            database.close()

    def _roles(self) -> list[Role]:
        roles = []
        for server in self.servers:
            roles.append(Role(server.name, self._server_command(server)))
        for worker in self.workers:
            roles.append(Role(worker, self._commands["worker"].replace("worker@", f"{worker}@")))
        return roles + [Role(name, self._commands[name]) for name in (*self.helpers, "beat", "web")]

    def _server_command(self, server: ServerSpec) -> str:
        journal, starts = self.journal(server.name), self.starts(server.name)
        if server.kind == "plain":
            return f'"{sys.executable}" -m tools.drill.plain_server {server.port} "{journal}" "{starts}"'
        mode = "--async" if server.kind == "async" else ""
        command = f'"{sys.executable}" -m slotkeeper.serve tools.drill.drill_model:work {mode} --grace 1'
        return f'{command} --slots {server.slots} --port {server.port} --journal "{journal}"'

    def _make(self, role: Role) -> None:
        if role.name == UNREAD and self.setting.has_unread_log:
            self._unread = _make_pipe(self._log(role.name))
        self._children[role.name] = ManagedProcess(role, self._environment(role.name), self.home, self._log(role.name))

    def _environment(self, name: str) -> Mapping[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SLOTKEEPER_")}
        return (
            kept
            | {
                "SLOTKEEPER_HOME": str(self.home / "state"),
                "SLOTKEEPER_DATABASE_URL": self._reached_record(),
                "SLOTKEEPER_REDIS_URL": self.redis_url,
                "SLOTKEEPER_BROKER_URL": f"redis://127.0.0.1:{self._port('broker')}/0" if self.proxy_ports else "",
                "SLOTKEEPER_PORT": str(self._ports["web"]),
                "SLOTKEEPER_GRACE_S": str(GRACE_S),
                "SLOTKEEPER_LOG_LEVEL": "INFO",
                "SLOTKEEPER_WEBHOOK_ALLOW": "127.0.0.1/32",
                STARTS: str(self.starts(name)),
                "PYTHONPATH": process_clocks.python_path(),
                "PYTHONUNBUFFERED": "1",
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            }
            | self._time(name)
        )

    def _reached_record(self) -> str:
        """The database as the processes reach it."""
        if "database" not in self.proxy_ports:
            return self.database_url
        port = self.proxy_ports["database"].port
        if self.setting.owns_postgres:
            return postgres_server.url(port)
        # No TLS, so that the proxy can read along.
        url = make_url(self.setting.database).set(host="127.0.0.1", port=port)
        return url.update_query_dict({"sslmode": "disable", "gssencmode": "disable"}).render_as_string(False)

    def _time(self, name: str) -> dict[str, str]:
        """Environment of a process whose clock can be set."""
        library = process_clocks.library()
        if not self.setting.has_clocks or library is None or name not in self.clocked:
            return {}
        self.set_clock(name, process_clocks.RIGHT)
        return process_clocks.environment(library, self._clock(name))

    def _clock(self, name: str) -> Path:
        return self.home / f"{name}.clock"

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _launch(self, name: str) -> None:
        if name == UNREAD and self._unread is not None:
            _empty(self._unread)  # As a supervisor does that makes a new pipe for each process.
        try:
            self._guardian.add(self._children[name].start())
        except OSError as error:
            raise UpError(f"{name} cannot be started: {error.strerror}.") from error

    def _runs(self, child: ManagedProcess) -> bool:
        pid = child.pid
        if pid is not None and child.poll() is not None:
            self._guardian.drop(pid)
            process_clocks.clear_after(pid)
        return child.pid is not None

    def _signal(self, child: ManagedProcess, number: signal.Signals) -> None:
        if child.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _START_S
        while not condition():
            for name, child in self._children.items():
                if name not in self._down and self._started(name) and not self._runs(child):
                    raise UpError(f"{name} ended while it started: {child.last_log_line()} ({child.log})")
            if time.monotonic() > until:
                raise UpError(f"{what} within {_START_S:.0f} s: see the logs in {self.logs}.")
            time.sleep(_LOOK_S)

    def _started(self, name: str) -> bool:
        return self._log(name).exists()


def _make_pipe(path: Path) -> int:
    """Make a pipe that this process holds open and does not read, as small as the system allows."""
    os.mkfifo(path, 0o600)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1)
    return pipe


def _empty(pipe: int) -> None:
    with suppress(BlockingIOError):
        while os.read(pipe, 1 << 16):
            pass


def _ready(client: Client) -> bool:
    try:
        client.get("/health/ready")
    except ClientError:
        return False
    return True
