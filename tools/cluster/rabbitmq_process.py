"""A real RabbitMQ for the tests: the one of Debian, on free loopback ports, with its files in a given folder."""

import glob
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from app.up.ports import free_port
from tools.cluster.stack import eventually, listens

_PROGRAMS = "/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin"  # Those on PATH change the user.
# Its standard input closes when the tests end, in whatever way; then it kills both groups of processes.
_WATCH = 'read -r _; kill -KILL "-$1" "-$2"'


class NoRabbitMQ(Exception):
    """There is no RabbitMQ to test with; the message names the reason."""


class RabbitMQ:
    """One node.  The user `guest` has all permissions from this machine."""

    def __init__(self, folder: Path) -> None:
        folders = sorted(glob.glob(_PROGRAMS))
        if not folders:
            raise NoRabbitMQ("rabbitmq-server is not installed (Debian: apt-get install rabbitmq-server)")
        self._programs, self.folder, self.port = Path(folders[-1]), folder, free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watch: subprocess.Popen[bytes] | None = None
        plugins = folder / "enabled_plugins"
        folder.mkdir(parents=True, exist_ok=True)
        plugins.write_text("[].\n")
        self._env = {
            **os.environ,
            "HOME": str(folder),  # for the cookie of Erlang
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(free_port()),
            "RABBITMQ_NODENAME": f"test{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
            "RABBITMQ_CONFIG_FILE": str(folder / "none"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
        }

    def __enter__(self) -> Self:
        log = (self.folder / "out.log").open("wb")
        # epmd is Erlang's port mapper.  A node would start it as a daemon, which would outlive the tests.
        for command in (["epmd"], [str(self._programs / "rabbitmq-server")]):
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        pids = [str(process.pid) for process in self._processes]
        self._watch = subprocess.Popen(["/bin/sh", "-c", _WATCH, "rabbitmq-watch", *pids], stdin=subprocess.PIPE)
        try:
            eventually(lambda: listens(self.port), "RabbitMQ listens", 180)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        """Kill all processes; their files are not needed afterwards."""
        if self._watch is not None:
            self._watch.communicate()
        for process in self._processes:
            process.wait()

    def run(self, *arguments: str) -> str:
        """Run a command of rabbitmqctl, and return what it prints."""
        command: Sequence[str] = [str(self._programs / "rabbitmqctl"), *arguments]
        return subprocess.run(command, env=self._env, check=True, capture_output=True, text=True).stdout

    @property
    def url(self) -> str:
        """The URL of the first virtual host, whose queues are classic queues by default."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def quorum_url(self) -> str:
        """Make a virtual host whose queues are quorum queues by default, and return its URL."""
        self.run("add_vhost", "quorum", "--default-queue-type", "quorum")
        self.run("set_permissions", "-p", "quorum", "guest", ".*", ".*", ".*")
        return f"amqp://guest:guest@127.0.0.1:{self.port}/quorum"
