"""A whole Slotkeeper in a separate folder, whose processes can be killed, stopped and started again."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import psycopg
from redis import Redis
from sqlalchemy import make_url

from app.up import ports, valkey_server
from app.up.errors import UpError
from app.up.guardian import Guardian
from app.up.managed_process import ManagedProcess, Role
from app.up.plan import read_procfile
from migrations import migrate
from slotkeeper.client import Client, ClientError
from slotkeeper.db import Database
from slotkeeper.jobs import ledger
from tasks.security.keyring import Purpose, decode_secret, derive
from tools.cluster import postgres_server, process_clocks
from tools.cluster.protocol_filters import BrokerMessages, LostCommits
from tools.cluster.tcp_proxy import Proxy, ProxyPort

GRACE_S = 7.0
UNREAD = "maintenance"
"""The process whose log is not read, in a drill with that fault; it logs the end of each job."""
_START_S = 60.0
_STOP_S = 15.0
_LOOK_S = 0.05
_REDIS_S = 5
_NOT_HELPERS = frozenset({"worker", "web", "beat", "flower"})
_GATEWAY, _AGENTS = "gateway", "agents"  # where workers reach the gateway, and where agents do
NODE_POOL = "drill"
"""The pool of all nodes."""
_STORES = frozenset({"redis", "replica", "broker", "database"})

SQLITE, POSTGRESQL = "sqlite", "postgresql"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One inference server."""

    name: str
    model: str
    slots: int
    port: int
    command: str = ""
    """Starts it."""
    config: Mapping[str, object] = field(default_factory=dict, hash=False)
    """The configuration of its model."""
    node_function: str = ""
    """A node: its agent runs this function, `module:name`, and connects to the gateway; `port` is not used."""

    @property
    def is_node(self) -> bool:
        return bool(self.node_function)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The processes of a cluster beside its inference servers, and what can be done to them."""

    workers: int = 2
    database: str = SQLITE
    """SQLITE; POSTGRESQL: the cluster starts a server; or the URL of an empty PostgreSQL database."""
    has_proxy: bool = False
    """Processes reach their servers through a proxy, and the broker has a Valkey of its own."""
    has_replica: bool = False
    """The queues' Redis has a replica."""
    has_clocks: bool = False
    """Clocks of processes can be set."""
    has_unread_log: bool = False
    """The log of the process UNREAD is not read."""
    receiver_port: int | None = None
    """Where webhooks are received; the proxy leads there, too."""
    seed: int = 0

    @property
    def owns_postgres(self) -> bool:
        return self.database == POSTGRESQL

    @property
    def has_postgres(self) -> bool:
        return self.database != SQLITE


class Cluster:
    """A whole installation with its servers.  One thread at a time may use it.

    Processes reach their servers by ports of `proxy` if `spec` has one.  Who breaks the cluster connects directly.
    """

    def __init__(
        self,
        home: Path,
        guardian: Guardian,
        proxy: Proxy,
        spec: ClusterSpec = ClusterSpec(),
        servers: Sequence[ServerSpec] = (),
    ) -> None:
        self.home, self.logs = home, home / "logs"
        self.spec, self.servers = spec, servers
        self._guardian, self._proxy = guardian, proxy
        self.workers = tuple(f"worker-{n}" for n in range(1, spec.workers + 1))
        self._commands = read_procfile()
        self.has_nodes = any(server.is_node for server in servers)
        helpers = [name for name in self._commands if name not in _NOT_HELPERS]
        self.helpers = (*helpers, *[_GATEWAY] * self.has_nodes)
        self._commands = {**self._commands, _GATEWAY: f'"{sys.executable}" -P -m app.gateway'}
        self._ports = {name: ports.free_port() for name in ("web", *self.valkeys(), "database", _GATEWAY, _AGENTS)}
        self._ports |= {server.name: self._port_of(server) for server in self.servers}
        if spec.receiver_port is not None:
            self._ports["receivers"] = spec.receiver_port
        self._redis_pair = ["redis", "replica"]  # names of the children: the queues' primary, then its replica
        self.url = f"http://127.0.0.1:{self._ports['web']}"
        self.commits = LostCommits(Random(f"{spec.seed} commits"))
        self.broker_messages = BrokerMessages(Random(f"{spec.seed} messages"))
        self.proxy_ports: dict[str, ProxyPort] = {}
        self._children: dict[str, ManagedProcess] = {}
        self._down: set[str] = set()
        self.crashes: list[str] = []
        """Processes that ended although the drill did not end them, with their last log lines."""
        self.revoked: set[str] = set()
        """Ids of the jobs that were revoked through Celery."""
        self.refuse_deliveries: Callable[[float], None] = lambda share: None
        """Make the receivers refuse this share of the webhook messages."""
        self.clocked = (*self.workers, *self.helpers, "beat", "web")
        self._unread_pipe: int | None = None  # the pipe that takes the log of UNREAD

    # -- addresses and paths -------------------------------------------------------------------------------

    @property
    def database_url(self) -> str:
        """The URL of the database, without the proxy."""
        if self.spec.owns_postgres:
            return postgres_server.url(self._ports["database"])
        return self.spec.database if self.spec.has_postgres else f"sqlite:///{self.home / 'record.db'}"

    @property
    def redis_url(self) -> str:
        """The URL of the queues' Redis, through the proxy: its port leads to the primary after a failover."""
        return f"redis://127.0.0.1:{self._port('redis')}/0"

    @property
    def broker_url(self) -> str:
        """The URL of the broker, without the proxy."""
        return f"redis://127.0.0.1:{self._ports['broker' if self.spec.has_proxy else 'redis']}/0"

    def endpoint(self, server: ServerSpec) -> str:
        port = self.proxy_ports[server.name].port if server.name in self.proxy_ports else server.port
        return f"http://127.0.0.1:{port}/generate"

    def receiver_url(self, number: int) -> str:
        """Return the `callback_url` of the job with this number."""
        return f"http://127.0.0.1:{self._port('receivers')}/{number}"

    def health_request(self, server: ServerSpec) -> tuple[str, dict[str, str]]:
        """Return the URL and the headers of a server's health check.  Raises UpError, OSError."""
        if not server.is_node:
            return f"{server.url}/health", {}
        secret = decode_secret((self.home / "state" / "secret").read_text(), "the secret")
        try:
            node = Client(self.url).get(f"/nodes/{server.name}")["id"]
        except ClientError as error:
            raise UpError(f"{server.name} is not known: {error}") from error
        key = derive(secret, Purpose.GATEWAY).hex()
        return f"http://127.0.0.1:{self._ports[_GATEWAY]}/n/{node}/0/health", {"Authorization": f"Bearer {key}"}

    def _port_of(self, server: ServerSpec) -> int:
        """Return the port that leads to a server: of a node, the one to which its agent connects."""
        return self._ports[_AGENTS] if server.is_node else server.port

    def _port(self, name: str) -> int:
        return self.proxy_ports[name].port if name in self.proxy_ports else self._ports[name]

    def valkeys(self) -> list[str]:
        """Return the names of its Valkeys, the queues' first."""
        return ["redis"] + ["replica"] * self.spec.has_replica + ["broker"] * self.spec.has_proxy

    def proxied_names(self) -> list[str]:
        """Return the names of the servers that are reached through the proxy."""
        if not self.spec.has_proxy:
            return []
        database = ["database"] * self.spec.has_postgres
        receivers = ["receivers"] * ("receivers" in self._ports)
        gateway = [_GATEWAY] * self.has_nodes
        return ["redis", "broker", *database, *gateway, *(server.name for server in self.servers), *receivers]

    # -- starting and ending -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all processes, wait until they are ready, and register the servers.  Raises UpError."""
        self.start_stores()
        self._prepare_database()
        for role in self._roles():
            self._create(role)
            self._launch(role.name)
        client = Client(self.url)
        self._wait(lambda: _is_ready(client), "The API did not become ready")
        for server in self.servers:
            if server.is_node:
                self._start_node(server)
                continue
            self._wait(lambda port=server.port: ports.is_open("127.0.0.1", port), f"{server.name} does not listen")  # type: ignore[misc]
        for server in self.servers:
            self.register(server)
        for server in self.servers:
            if server.is_node:
                self._wait(lambda name=server.name: _is_served(client, name), f"{server.name} did not connect")  # type: ignore[misc]

    def _start_node(self, server: ServerSpec) -> None:
        """Enrol a node, and start its agent.  Raises UpError."""
        folder = self.home / server.name
        folder.mkdir()
        config = [f'gateway = "ws://127.0.0.1:{self._port(server.name)}"', f"slots = {server.slots}"]
        config += [f"[models.{server.model}]", f'function = "{server.node_function}"']
        (folder / "agent.toml").write_text("\n".join(config))
        try:
            grant = {"pool": NODE_POOL, "max_slots": server.slots}
            token = Client(self.url).post("/nodes/tokens", grant)["token"]
        except ClientError as error:
            raise UpError(f"{server.name} could not be enrolled: {error}") from error
        agent = [sys.executable, "-P", "-m", "slotkeeper.agent", "enroll", self.url, "--name", server.name]
        done = subprocess.run([*agent, "--token", token], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UpError(f"{server.name} could not be enrolled: {done.stderr}")
        self._create(Role(server.name, f'{server.command} --config "{folder / "agent.toml"}"'))
        self._launch(server.name)

    def start_stores(self) -> None:
        """Start Valkey and PostgreSQL, and open the proxy's ports.  Raises UpError."""
        for folder in (self.logs, *(self.home / name for name in self.valkeys())):
            folder.mkdir(parents=True, exist_ok=True)
        (self.home / "state").mkdir(mode=0o700)  # Private: the user that runs PostgreSQL can enter the folder above.
        self._open_proxy_ports()
        for role in self._store_roles():
            self._create(role)
            self._launch(role.name)
        self._wait(
            lambda: all(valkey_server.is_ready(self._ports[name]) for name in self.valkeys()), "Valkey did not answer"
        )
        if self.spec.has_replica:
            self._follow(self._redis_pair[1], self._redis_pair[0])

    def stop(self) -> list[str]:
        """Stop all processes with SIGTERM, stores last; return the names of those that had to be killed."""
        killed = []
        stores = [name for name in self._children if name in _STORES]
        for names in ([name for name in self._children if name not in _STORES], stores):
            alive = [self._children[name] for name in names if self._children[name].pid]
            for child in alive:
                self._signal(child, signal.SIGCONT)
                child.terminate()
            until = time.monotonic() + _STOP_S
            while left := [child for child in alive if self._is_running(child)]:
                if time.monotonic() > until:
                    killed += [child.role.name for child in left]
                    self._end(left)
                time.sleep(_LOOK_S)
        return killed

    def end(self) -> None:
        """Kill all processes at once."""
        self._end(self._children.values())
        if self._unread_pipe is not None:
            os.close(self._unread_pipe)
            self._unread_pipe = None

    def _end(self, children: Iterable[ManagedProcess]) -> None:
        ending = list(children)
        for child in ending:
            child.kill()
        for child in ending:
            while self._is_running(child):
                time.sleep(_LOOK_S)

    # -- faults --------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process and to everything that it has started."""
        self._down.add(self._child_name(name))
        self._end([self._children[self._child_name(name)]])

    def terminate(self, name: str) -> None:
        self._down.add(name)
        self._children[name].terminate()

    def freeze(self, name: str) -> None:
        self._signal(self._children[name], signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal(self._children[name], signal.SIGCONT)

    def start_again(self, name: str) -> bool:
        """Start an ended process again.  One that still runs is killed first; return whether it was."""
        child = self._children[self._child_name(name)]
        killed = self._is_running(child)
        self._end([child])
        self._launch(self._child_name(name))
        self._down.discard(self._child_name(name))
        return killed

    def flush(self, name: str) -> None:
        """Empty a Valkey.  Raises redis errors."""
        with self._valkey(self._child_name(name)) as redis:
            redis.flushall()

    def bound_memory(self, name: str, most_bytes: int) -> None:
        """Set the `maxmemory` of a Valkey; 0: no limit.  Raises redis errors."""
        with self._valkey(self._child_name(name)) as redis:
            redis.config_set("maxmemory", most_bytes)

    def fall_behind(self) -> bool:
        """Stop the replication to the queues' replica.  False: it is not in sync yet.  Raises redis errors."""
        with self._valkey(self._redis_pair[1]) as replica:
            if replica.info("replication").get("master_link_status") != "up":
                return False
            replica.replicaof("NO", "ONE")
        return True

    def fail_over(self) -> None:
        """Kill the queues' Redis, and make its replica the primary.  Raises UpError, redis errors."""
        old, new = self._redis_pair
        self._down.add(old)
        self._end([self._children[old]])
        self._redis_pair = [new, old]
        self.proxy_ports["redis"].redirect(("127.0.0.1", self._ports[new]))
        self._launch(old)
        self._down.discard(old)
        self._wait(lambda: valkey_server.is_ready(self._ports[old]), f"{old} did not answer")
        self._follow(old, new)

    def promote_replica(self) -> bool:
        """Promote the queues' replica.  Existing connections stay with the old primary, which still takes writes.

        False: the replica is not in sync yet.  Raises redis errors.
        """
        old, new = self._redis_pair
        with self._valkey(new) as replica:
            if replica.info("replication").get("master_link_status") != "up":
                return False
            replica.replicaof("NO", "ONE")
        self._redis_pair = [new, old]
        self.proxy_ports["redis"].redirect(("127.0.0.1", self._ports[new]), keeps_connections=True)
        return True

    def demote_old_primary(self) -> None:
        """Make the old primary the replica of the new one, as Sentinel does in the end.  Raises redis errors."""
        new, old = self._redis_pair
        self._follow(old, new)
        with self._valkey(old) as redis:
            redis.client_kill_filter(_type="normal", skipme=True)

    def refuse_writes(self, name: str, *, refuse: bool) -> None:
        """Make a Valkey, or PostgreSQL, refuse writes, or end that.  Raises redis errors, psycopg.OperationalError."""
        if name != "database":
            with self._valkey(self._child_name(name)) as redis:
                redis.config_set("min-replicas-to-write", 9 if refuse else 0)
            return
        url = make_url(self.database_url).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url, autocommit=True, connect_timeout=5) as admin:
            admin.execute("SET default_transaction_read_only = off")
            setting = "SET default_transaction_read_only = on" if refuse else "RESET default_transaction_read_only"
            admin.execute(f"ALTER SYSTEM {setting}")
            admin.execute("SELECT pg_reload_conf()")

    def set_clock(self, name: str, offset_s: str) -> None:
        """Shift the clock of a process by `offset_s` seconds, such as "-30"; it takes effect within a second."""
        process_clocks.set_clock(self._clock_path(name), offset_s)

    def register(self, server: ServerSpec, slots: int | None = None) -> None:
        """Register a server and configure its model.  `slots`: None: all of them.  Raises UpError.

        A node registers itself when it connects.
        """
        client = Client(self.url)
        body = {"model": server.model, "server": server.name, "slots": slots or server.slots}
        try:
            if not server.is_node:
                client.post("/admin/register", body | {"endpoint": self.endpoint(server)})
            client.request("PUT", f"/admin/model-configs/{server.model}", body=server.config)
        except ClientError as error:
            raise UpError(f"The servers could not be registered: {error}") from error

    def restart_ended(self) -> None:
        """Start processes again that ended by themselves, as a supervisor would."""
        for name, child in self._children.items():
            if name not in self._down and not self._is_running(child):
                self.crashes.append(f"{name}: {child.last_log_line()}")
                self._launch(name)

    def _child_name(self, name: str) -> str:
        """Return the name of the child: "redis" is the queues' primary, which changes in a failover."""
        return self._redis_pair[0] if name == "redis" else name

    def _valkey(self, name: str) -> "Redis":
        return Redis(port=self._ports[name], socket_timeout=_REDIS_S, socket_connect_timeout=_REDIS_S)

    def _follow(self, name: str, master: str) -> None:
        with self._valkey(name) as redis:
            redis.replicaof("127.0.0.1", self._ports[master])

    # -- processes -----------------------------------------------------------------------------------------

    def _open_proxy_ports(self) -> None:
        for name in self.proxied_names():
            proxy_port = self._proxy.open(name, self._address(name))
            if name == "broker":
                proxy_port.filter_streams(self.broker_messages.make_filter)
            if name == "database":
                proxy_port.filter_streams(self.commits.make_filter)
            self.proxy_ports[name] = proxy_port

    def _address(self, name: str) -> tuple[str, int]:
        if name == "database" and not self.spec.owns_postgres:
            url = make_url(self.spec.database)
            return url.host or "127.0.0.1", url.port or 5432
        return "127.0.0.1", self._ports[name]

    def _store_roles(self) -> list[Role]:
        program = valkey_server.find_valkey()
        roles = [
            replace(valkey_server.valkey_role(program, self._ports[name], self.home / name, 1), name=name)
            for name in self.valkeys()
        ]
        if self.spec.owns_postgres:
            self.home.chmod(0o711)  # The user that runs PostgreSQL must get to its folder.
            programs = postgres_server.prepare(self.home / "postgres")
            role = postgres_server.role(programs, self.home / "postgres", self._ports["database"], 1)
            roles.append(replace(role, name="database"))
        return roles

    def _prepare_database(self) -> None:
        """Create the tables.  Raises UpError: the database cannot be reached, or has jobs."""
        if self.spec.owns_postgres:
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
            if not server.is_node:  # Its agent needs the API.
                roles.append(Role(server.name, server.command))
        for worker in self.workers:
            roles.append(Role(worker, self._commands["worker"].replace("worker@", f"{worker}@")))
        return roles + [Role(name, self._commands[name]) for name in (*self.helpers, "beat", "web")]

    def _create(self, role: Role) -> None:
        if role.name == UNREAD and self.spec.has_unread_log:
            self._unread_pipe = _make_pipe(self._log_path(role.name))
        self._children[role.name] = ManagedProcess(
            role, self._environment(role.name), self.home, self._log_path(role.name)
        )

    def _environment(self, name: str) -> Mapping[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("SLOTKEEPER_")}
        return (
            inherited
            | {
                "SLOTKEEPER_HOME": str(self.home / "state"),
                "SLOTKEEPER_DATABASE_URL": self._process_database_url(),
                "SLOTKEEPER_REDIS_URL": self.redis_url,
                "SLOTKEEPER_BROKER_URL": f"redis://127.0.0.1:{self._port('broker')}/0" if self.proxy_ports else "",
                "SLOTKEEPER_PORT": str(self._ports["web"]),
                "SLOTKEEPER_GRACE_S": str(GRACE_S),
                "SLOTKEEPER_LOG_LEVEL": "INFO",
                "SLOTKEEPER_WEBHOOK_ALLOW": "127.0.0.1/32",
                "SLOTKEEPER_NODE_PORT": str(self._ports[_AGENTS]),
                "SLOTKEEPER_GATEWAY_BIND": f"127.0.0.1:{self._ports[_GATEWAY]}",
                "SLOTKEEPER_GATEWAY_ADDRESS": f"http://127.0.0.1:{self._port(_GATEWAY)}",
                "PYTHONPATH": process_clocks.python_path(),
                "PYTHONUNBUFFERED": "1",
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            }
            | self._clock_environment(name)
        )

    def _process_database_url(self) -> str:
        """Return the URL of the database for the processes, through the proxy if there is one."""
        if "database" not in self.proxy_ports:
            return self.database_url
        port = self.proxy_ports["database"].port
        if self.spec.owns_postgres:
            return postgres_server.url(port)
        # No TLS, so that the proxy can read the protocol.
        url = make_url(self.spec.database).set(host="127.0.0.1", port=port)
        return url.update_query_dict({"sslmode": "disable", "gssencmode": "disable"}).render_as_string(False)

    def _clock_environment(self, name: str) -> dict[str, str]:
        """Return the environment variables for a process whose clock can be set."""
        library = process_clocks.library()
        if not self.spec.has_clocks or library is None or name not in self.clocked:
            return {}
        self.set_clock(name, process_clocks.RIGHT)
        return process_clocks.environment(library, self._clock_path(name))

    def _clock_path(self, name: str) -> Path:
        return self.home / f"{name}.clock"

    def _log_path(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _launch(self, name: str) -> None:
        if name == UNREAD and self._unread_pipe is not None:
            _drain_pipe(self._unread_pipe)  # A supervisor makes a new pipe for each process.
        try:
            self._guardian.add(self._children[name].start())
        except OSError as error:
            raise UpError(f"{name} cannot be started: {error.strerror}.") from error

    def _is_running(self, child: ManagedProcess) -> bool:
        pid = child.pid
        if pid is not None and child.poll() is not None:
            self._guardian.drop(pid)
            process_clocks.remove_leftovers(pid)
        return child.pid is not None

    def _signal(self, child: ManagedProcess, number: signal.Signals) -> None:
        if child.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds.  `what`: the error if it does not.  Raises UpError."""
        until = time.monotonic() + _START_S
        while not condition():
            for name, child in self._children.items():
                if name not in self._down and self._has_log(name) and not self._is_running(child):
                    raise UpError(f"{name} ended while it started: {child.last_log_line()} ({child.log})")
            if time.monotonic() > until:
                raise UpError(f"{what} within {_START_S:.0f} s: see the logs in {self.logs}.")
            time.sleep(_LOOK_S)

    def _has_log(self, name: str) -> bool:
        return self._log_path(name).exists()


def _make_pipe(path: Path) -> int:
    """Make a pipe, as small as the system allows, that this process holds open and does not read."""
    os.mkfifo(path, 0o600)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1)
    return pipe


def _drain_pipe(pipe: int) -> None:
    with suppress(BlockingIOError):
        while os.read(pipe, 1 << 16):
            pass


def _is_served(client: Client, node: str) -> bool:
    """Return whether a node is connected and serves its model."""
    try:
        found = client.get(f"/nodes/{node}")
    except ClientError:
        return False
    return found["state"] == "connected" and bool(found["models"])


def _is_ready(client: Client) -> bool:
    try:
        client.get("/health/ready")
    except ClientError:
        return False
    return True
