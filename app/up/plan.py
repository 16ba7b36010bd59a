"""The processes of `slotkeeper up` and their ports, from the settings, which are checked here."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.config import AppSettings, GatewaySettings, UpSettings, local_api_url
from app.up.managed_process import Role
from app.up.ports import Port, free_port
from migrations.revisions import is_current
from routing.config import RoutingSettings
from slotkeeper.config import StorageSettings
from tasks.config import TaskSettings

VALKEY_STOP_ORDER = 3  # after all roles of `UpPlan.roles`
_STOP_AFTER_GRACE_S = 4.0
_STOP_GATEWAY_S = 25.0


@dataclass(frozen=True, slots=True)
class DemoServer:
    """A reference server that only simulates inference."""

    name: str
    model: str
    options: str
    port: int
    slots: int = 2

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        return "/generate"


@dataclass(frozen=True, slots=True)
class UpPlan:
    """The settings and ports, which are determined before the first process starts."""

    home: Path
    app: AppSettings
    database_url: str
    redis_url: str
    """The Redis of the settings; empty: a Valkey is started."""
    broker_url: str
    """The broker of the settings; empty: the same Redis or Valkey."""
    redis_port: int
    flower_port: int
    grace_s: float
    demo: tuple[DemoServer, ...]
    node_port: int | None = None
    """Where agents of nodes connect; None: there is no gateway."""

    @property
    def url(self) -> str:
        """Return the URL at which this machine reaches the API."""
        return local_api_url(self.app)

    @property
    def flower_url(self) -> str:
        return f"http://127.0.0.1:{self.flower_port}"

    def command(self) -> str:
        """Return how `slotkeeper` is called from a second terminal in the current folder."""
        program = Path(sys.executable).with_name("slotkeeper")
        command = shlex.quote(short_path(program)) if program.exists() else "slotkeeper"
        if self.home == StorageSettings.model_fields["home"].default.absolute():
            return command
        return f"SLOTKEEPER_HOME={shlex.quote(short_path(self.home))} {command}"

    def ports(self) -> list[Port]:
        ports = [Port(self.app.port, "the API", "SLOTKEEPER_PORT", self.app.host)]
        if not self.redis_url:
            ports.append(Port(self.redis_port, "Valkey", "SLOTKEEPER_REDIS_PORT"))
        ports.append(Port(self.flower_port, "Flower", "SLOTKEEPER_FLOWER_PORT"))
        if self.node_port:
            ports.append(Port(self.node_port, "the gateway", "SLOTKEEPER_NODE_PORT"))
        return ports + [Port(server.port, server.name, "SLOTKEEPER_DEMO_PORT") for server in self.demo]

    def environment(self) -> dict[str, str]:
        """Return the environment of all children, so that they have the same settings in any folder."""
        variables = {
            "SLOTKEEPER_HOME": str(self.home),
            "SLOTKEEPER_HOST": self.app.host,
            "SLOTKEEPER_PORT": str(self.app.port),
            "SLOTKEEPER_REDIS_PORT": str(self.redis_port),
            "SLOTKEEPER_FLOWER_PORT": str(self.flower_port),
            "SLOTKEEPER_DATABASE_URL": self.database_url,
            "SLOTKEEPER_GRACE_S": str(self.grace_s),
            "SLOTKEEPER_WEB_THREADS": str(self.app.web_threads),
            "SLOTKEEPER_TLS_CERTIFICATE": _absolute(self.app.tls_certificate),
            "SLOTKEEPER_TLS_KEY": _absolute(self.app.tls_key),
            "PYTHONUNBUFFERED": "1",
            "PYTHONNODEBUGRANGES": "1",  # Tracebacks without columns save 1 MiB of memory in each process.
            # The programs of this virtual environment are found, even if it is not activated.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        }
        return {**os.environ, **variables}

    def migration(self) -> Role | None:
        """Return the process that migrates the database, or None if the schema is current."""
        if is_current(self.database_url):
            return None
        return Role("migrate", f'"{sys.executable}" -m app.cli migrate', exits=True)

    def roles(self) -> list[Role]:
        """Return the roles of the Procfile in its order, and the demo servers; Valkey is started before them.

        Beat runs as a thread of maintenance, and the relay as a thread of webhooks, which saves the memory of two
        processes.
        """
        stops = {  # stop_order, stop_timeout_s
            "web": (0, 4.0),
            "worker": (1, self.grace_s + _STOP_AFTER_GRACE_S),
            "maintenance": (1, self.grace_s + _STOP_AFTER_GRACE_S),
            "webhooks": (1, 7.0),
            "flower": (2, 2.0),
        }
        roles = []
        commands = {name: command for name, command in read_procfile().items() if name not in ("beat", "relay")}
        commands["maintenance"] += " --embedded-beat"
        commands["webhooks"] += " --embedded-relay"
        for name, command in commands.items():
            stop_order, stop_timeout_s = stops.get(name, (1, 5.0))
            port = self.flower_port if name == "flower" else None
            roles.append(Role(name, command, port, stop_timeout_s=stop_timeout_s, stop_order=stop_order))
        if self.node_port is not None:
            command = f'"{sys.executable}" -P -m app.gateway'
            roles.append(Role("gateway", command, self.node_port or None, stop_timeout_s=_STOP_GATEWAY_S, stop_order=1))
        python = f'"{sys.executable}" -m slotkeeper.serve'
        for server in self.demo:
            command = f"{python} {server.options} --slots {server.slots} --port {server.port} --grace 1"
            roles.append(Role(server.name, command, server.port, stop_timeout_s=3, stop_order=2))
        return roles


def read_plan(demo: bool) -> UpPlan:
    """Return the plan from the settings.  Raises InvalidSetting, UpError."""
    app, storage, routing, tasks, up = AppSettings(), StorageSettings(), RoutingSettings(), TaskSettings(), UpSettings()
    app.check_exposure()
    app.check_tls()
    return UpPlan(
        home=storage.home.absolute(),
        app=app,
        database_url=_make_path_absolute(storage.sqlalchemy_url),
        redis_url=routing.redis_url,
        broker_url=tasks.broker_url,
        redis_port=routing.redis_port,
        flower_port=up.flower_port,
        grace_s=tasks.grace_s,
        demo=_demo_servers(up.demo_port) if demo else (),
        node_port=GatewaySettings().node_port,
    )


def short_path(path: Path) -> str:
    """Return the path relative to the current folder, if it is in it; otherwise the whole path."""
    with suppress(ValueError):
        return str(path.relative_to(os.getcwd()))
    return str(path)


def read_procfile() -> Mapping[str, str]:
    """Return the commands of the Procfile by the names of the roles."""
    text = Path(__file__).with_name("Procfile").read_text("utf-8")
    return dict(re.findall(r"^([a-z]+): *(.+)$", text, re.MULTILINE))


def _demo_servers(base: int | None) -> tuple[DemoServer, ...]:
    first, second, third = (base + n if base else free_port() for n in range(3))
    return (
        DemoServer("zimg-api1", "zimg", "slotkeeper.serve.demo:zimg", first),
        DemoServer("flux-api1", "flux", "slotkeeper.serve.demo:flux --async", second),
        DemoServer("trellis-api1", "trellis", "slotkeeper.serve.demo:trellis --async", third, slots=1),
    )


def _absolute(path: str) -> str:
    """Return the absolute path, since children run in another folder; "": there is none."""
    return path and os.path.abspath(path)


def _make_path_absolute(url: str) -> str:
    """Return an SQLite URL with an absolute path, since children run in another folder."""
    scheme, _, rest = url.partition(":///")
    path, mark, query = rest.partition("?")
    return f"{scheme}:///{os.path.abspath(path)}{mark}{query}" if url.startswith("sqlite") and path else url
