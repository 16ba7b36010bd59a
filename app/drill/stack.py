"""A whole Slotkeeper in a folder of its own, whose processes can be killed, stopped and started again."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from redis import Redis

from app.client import Client, ClientError
from app.drill.work import STARTS
from app.up import ports, valkey
from app.up.children import Child, Role
from app.up.errors import UpError
from app.up.guardian import Guardian
from app.up.plan import procfile

GRACE_S = 5.0
_START_S = 60.0
_STOP_S = 15.0
_LOOK_S = 0.05
# Runs that are short beside the default two seconds between polls.
_ASYNC = {"model_type": "async", "poll_interval": 0.2}
# Whoever kills at random must not take the jobs that were hit for poison.
_CONFIG = {"max_crashes": 100}


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """One inference server."""

    name: str
    model: str
    slots: int
    port: int
    asynchronous: bool

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def server_plans(slots: int = 8) -> list[ServerPlan]:
    """Three servers for two models, one of them asynchronous; at least 4 `slots` among them."""
    quarter = slots // 4
    return [
        ServerPlan("sync-1", "sync", quarter, ports.free_port(), False),
        ServerPlan("sync-2", "sync", quarter, ports.free_port(), False),
        ServerPlan("async-1", "async", slots - 2 * quarter, ports.free_port(), True),
    ]


class Stack:
    """Starts everything when entered, ends everything when left.  One thread at a time may use it."""

    def __init__(self, home: Path, guardian: Guardian, workers: int = 2, slots: int = 8) -> None:
        self.home, self.logs = home, home / "logs"
        self._guardian = guardian
        self.workers = tuple(f"worker-{n}" for n in range(1, workers + 1))
        self.servers = server_plans(slots)
        self._redis_port, self._web_port = ports.free_port(), ports.free_port()
        self.url = f"http://127.0.0.1:{self._web_port}"
        self.redis_url = f"redis://127.0.0.1:{self._redis_port}/0"
        self.record_url = f"sqlite:///{home / 'record.db'}"
        self._children: dict[str, Child] = {}
        self._down: set[str] = set()
        self.crashes: list[str] = []
        """What ended although nobody killed it."""

    def journal(self, server: str) -> Path:
        return self.home / f"{server}.journal"

    def starts(self, server: str) -> Path:
        return self.home / f"{server}.starts"

    # -- starting and ending -------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises UpError."""
        from jobs import migrate

        for folder in (self.logs, self.home / "valkey"):
            folder.mkdir(parents=True, exist_ok=True)
        program = valkey.find()
        migrate.upgrade(self.record_url)
        for role in self._roles(program):
            self._children[role.name] = Child(role, self._environment(role.name), self.home, self._log(role.name))
        self._launch("valkey")
        self._wait(lambda: valkey.answers(self._redis_port), "Valkey did not answer")
        for name in self._children:
            if name != "valkey":
                self._launch(name)
        client = Client(self.url)
        self._wait(lambda: _ready(client), "The API did not become ready")
        for server in self.servers:
            self._wait(lambda port=server.port: ports.is_open("127.0.0.1", port), f"{server.name} does not listen")  # type: ignore[misc]
        self._register(client)

    def stop(self) -> list[str]:
        """End everything in order; answers what had to be killed."""
        killed = []
        order = [name for name in self._children if name != "valkey"]
        for names in (order, ["valkey"]):
            alive = [self._children[name] for name in names if name in self._children and self._children[name].pid]
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

    def _end(self, children: Iterable[Child]) -> None:
        ending = list(children)
        for child in ending:
            child.kill()
        for child in ending:
            while self._runs(child):
                time.sleep(_LOOK_S)

    # -- faults --------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """SIGKILL to it and all that it has started."""
        self._down.add(name)
        self._end([self._children[name]])

    def terminate(self, name: str) -> None:
        self._down.add(name)
        self._children[name].terminate()

    def freeze(self, name: str) -> None:
        self._signal(self._children[name], signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal(self._children[name], signal.SIGCONT)

    def start_again(self, name: str) -> None:
        """What has not ended by itself until now is killed first."""
        self._end([self._children[name]])
        self._launch(name)
        self._down.discard(name)

    def flush(self) -> None:
        """Empty Valkey.  Raises redis errors."""
        with Redis.from_url(self.redis_url, socket_timeout=5) as redis:
            redis.flushall()

    def look(self) -> None:
        """Start again, as a supervisor would, what has ended by itself."""
        for name, child in self._children.items():
            if name not in self._down and not self._runs(child):
                self.crashes.append(f"{name}: {child.last_words()}")
                self._launch(name)

    # -- how it is made ------------------------------------------------------------------------------------

    def _roles(self, valkey_program: str) -> list[Role]:
        commands = procfile()
        roles = [valkey.role(valkey_program, self._redis_port, self.home / "valkey", 1)]
        for server in self.servers:
            mode = "--async" if server.asynchronous else ""
            command = f'"{sys.executable}" -m reference_server app.drill.work:work {mode} --grace 1'
            command += f' --slots {server.slots} --port {server.port} --journal "{self.journal(server.name)}"'
            roles.append(Role(server.name, command))
        for worker in self.workers:
            roles.append(Role(worker, commands["worker"].replace("worker@", f"{worker}@")))
        return roles + [Role(name, commands[name]) for name in ("maintenance", "beat", "web")]

    def _environment(self, name: str) -> Mapping[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SLOTKEEPER_")}
        return kept | {
            "SLOTKEEPER_HOME": str(self.home),
            "SLOTKEEPER_DATABASE_URL": self.record_url,
            "SLOTKEEPER_REDIS_PORT": str(self._redis_port),
            "SLOTKEEPER_PORT": str(self._web_port),
            "SLOTKEEPER_GRACE_S": str(GRACE_S),
            "SLOTKEEPER_LOG_LEVEL": "INFO",
            STARTS: str(self.starts(name)),
            "PYTHONUNBUFFERED": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        }

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _register(self, client: Client) -> None:
        try:
            for server in self.servers:
                body = {"model": server.model, "server": server.name, "slots": server.slots}
                client.post("/admin/register", body | {"endpoint": f"{server.url}/generate"})
                config = _CONFIG | (_ASYNC if server.asynchronous else {})
                client.call("PUT", f"/admin/model-configs/{server.model}", body=config)
        except ClientError as error:
            raise UpError(f"The servers could not be registered: {error}") from error

    def _launch(self, name: str) -> None:
        try:
            self._guardian.add(self._children[name].start())
        except OSError as error:
            raise UpError(f"{name} cannot be started: {error.strerror}.") from error

    def _runs(self, child: Child) -> bool:
        pid = child.pid
        if pid is not None and child.look() is not None:
            self._guardian.drop(pid)
        return child.pid is not None

    def _signal(self, child: Child, number: signal.Signals) -> None:
        if child.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _START_S
        while not condition():
            for name, child in self._children.items():
                if name not in self._down and self._started(name) and not self._runs(child):
                    raise UpError(f"{name} ended while it started: {child.last_words()} ({child.log})")
            if time.monotonic() > until:
                raise UpError(f"{what} within {_START_S:.0f} s: see the logs in {self.logs}.")
            time.sleep(_LOOK_S)

    def _started(self, name: str) -> bool:
        return self._log(name).exists()


def _ready(client: Client) -> bool:
    try:
        client.get("/health/ready")
    except ClientError:
        return False
    return True
