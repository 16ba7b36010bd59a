"""The attacked installation: the `web` process as the Procfile starts it, and the keys of its clients."""

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from app.up.plan import read_procfile
from slotkeeper.db import Database
from slotkeeper.registry.identity import Scope
from tests.support.keys import add_key
from tools.cluster.stack import BIN, Stack

PLACES = 1200
"""Connections that the process takes."""
_FILES = 8192


@dataclass
class Harness:
    """A Slotkeeper under attack.  The attacker `mallory`, the client `alice` and the operator have keys."""

    stack: Stack
    keys: dict[str, str]

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.stack.port

    def ask(self, who: str, method: str, path: str, body: Any = None, timeout_s: float = 10.0) -> requests.Response:
        """Send a request over a new connection, as a new client does."""
        headers = {"Authorization": f"Bearer {self.keys[who]}"} if who else {}
        return requests.request(method, self.stack.url + path, json=body, headers=headers, timeout=timeout_s)

    def connect(self) -> socket.socket:
        made = socket.create_connection(self.address, 10)
        made.settimeout(10)
        return made

    def head(self, who: str, path: str, *lines: str, method: str = "POST", kind: str = "application/json") -> bytes:
        """A request's head, up to its empty line."""
        head = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.stack.port}", f"Content-Type: {kind}", *lines]
        if who:
            head.append(f"Authorization: Bearer {self.keys[who]}")
        return ("\r\n".join(head) + "\r\n\r\n").encode()

    def jobs_of(self, who: str) -> list[dict[str, Any]]:
        found = self.ask(who, "GET", "/queue/jobs").json()["jobs"]
        return [job for job in found if job["tenant"] == who]


@contextmanager
def running_harness(home: Path, **env: str) -> Iterator[Harness]:
    """Start it, and end it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FILES:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (_FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard), hard)
        )
    settings = {"SLOTKEEPER_REQUIRE_KEYS": "true", "SLOTKEEPER_MAX_CONNECTIONS": str(PLACES), **env}
    with Stack(home, settings) as stack:
        stack.env["PATH"] = f"{BIN}:{stack.env['PATH']}"
        web = stack.start("web", ["sh", "-c", f"exec {read_procfile()['web']}"])
        web.source(lambda: stack.answers("/health/live"), "it answers")
        harness = Harness(stack, _keys(home))
        answer = harness.ask("operator", "PUT", "/admin/model-configs/zimg", {})
        assert answer.ok, answer.text
        yield harness


def _keys(home: Path) -> dict[str, str]:
    record = Database(f"sqlite:///{home / 'record.db'}")
    made = {name: add_key(record, name) for name in ("alice", "mallory")}
    made["operator"] = add_key(record, "operator", Scope.OPERATE)
    record.close()
    return made


JOB = json.dumps({"model": "zimg", "payload": {"prompt": "a cat"}}).encode()
