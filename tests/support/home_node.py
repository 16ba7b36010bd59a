"""Nodes of real processes: gateways, agents, and what operators do for them."""

import sqlite3
import sys
from contextlib import closing
from typing import Any

from app.up.ports import free_port
from tests.support.http_api import HttpApi
from tools.cluster.stack import Process, Stack, eventually, listens

DEMO = "slotkeeper.serve.demo:zimg"


class Gateway:
    """A gateway process, and the port to which agents connect."""

    def __init__(self, stack: Stack, name: str = "gateway", port: int | None = None) -> None:
        self.port = port or free_port()
        stack.env["SLOTKEEPER_NODE_PORT"] = str(self.port)
        self.process: Process = stack.start(name, [sys.executable, "-P", "-m", "app.gateway"])
        self.process.source(lambda: listens(self.port), "it listens")


class HomeNode:
    """A node: its folder, and the process of its agent while it runs."""

    def __init__(self, api: HttpApi, name: str, port: int, pool: str = "homes", slots: int = 1, **models: Any) -> None:
        self.api, self.name, self.folder = api, name, api.stack.home / name
        self.folder.mkdir()
        self.lie = ""
        """How its agent lies (tests/system/nodes/liar.py); "": it does not."""
        self.config = self.folder / "agent.toml"
        self.write_config(port, slots, **models or {"zimg": {"function": DEMO}})
        grant = {"pool": pool, "owner": "acme", "max_slots": slots}
        token = api.call("POST", "/nodes/tokens", json=grant).json()["token"]
        command = [*self._command("enroll", api.stack.url), "--name", name, "--token", token]
        api.stack.run(command)
        self.process: Process | None = None

    def write_config(self, port: int, slots: int = 1, **models: Any) -> None:
        lines = [f'gateway = "ws://127.0.0.1:{port}"', f"slots = {slots}"]
        for model, entry in models.items():
            lines += [f"[models.{model}]", *(f'{field} = "{value}"' for field, value in entry.items())]
        self.config.write_text("\n".join(lines))

    def start(self) -> None:
        number = 1 + sum(name.startswith(f"{self.name}.") for name in self.api.stack.processes)
        self.process = self.api.stack.start(f"{self.name}.{number}", self._command("run"))

    def started(self) -> "HomeNode":
        self.start()
        self.wait_for("connected")
        return self

    def wait_for(self, state: str, within_s: float = 30.0) -> None:
        eventually(lambda: self.state() == state, f"node {self.name} is {state}", within_s)

    def state(self) -> str:
        return str(self.api.call("GET", f"/nodes/{self.name}").json()["state"])

    def command(self, *words: str) -> str:
        return self.api.stack.run(self._command(*words))

    def _command(self, word: str, *arguments: str) -> list[str]:
        module = ["-m", "tests.system.nodes.liar", self.lie] if self.lie else ["-P", "-m", "slotkeeper.agent"]
        python = [sys.executable, *module]
        return [*python, word, *arguments, "--config", str(self.config)]

    def count_runs(self, *, ended: bool = False) -> int:
        """Return how many runs have begun, or ended, as the journal has them."""
        path, table = self.folder / "agent-state" / "runs" / "journal.db", "ends" if ended else "runs"
        with closing(sqlite3.connect(path)) as journal:
            return int(journal.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
