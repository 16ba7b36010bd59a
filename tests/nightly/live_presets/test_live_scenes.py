"""The same scenes at each real server, with a real installation: normal, canceled, late, killed, starting, restarted.

Each server has one slot.  A supervisor starts its server again two seconds after its end.  The models write a line at
the begin and at the end of each run: from those lines the scenes count runs and find two at a time.
"""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from app.up.ports import free_port
from tests.nightly.live_presets.servers import (
    SCENE,
    WORDS,
    Live,
    installed,
    launch,
    prompt,
    stop,
    wait_until_ready,
    wanted,
)
from tests.support.cluster import Cluster
from tools.cluster.stack import eventually

pytestmark = [pytest.mark.live_servers, pytest.mark.timeout(300)]

LONG_S, RESTARTED_AFTER_S = 6.0, 2.0
_IDLE_AFTER_S = 15.0  # after the end of a canceled or late run, until its slot runs the next job


class Supervised:
    """A real server that a thread starts again whenever it has ended."""

    def __init__(self, live: Live, folder: Path) -> None:
        self.live, self.port, self._journal, self._group = live, free_port(), folder / "journal", folder / "group"
        self._binaries = installed(live.package)
        self._env = {"LIVE_JOURNAL": str(self._journal), "LIVE_GROUP": str(self._group), "BENTOML_HOME": str(folder)}
        self._wanted, self._over = threading.Event(), threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._supervise)
        self._thread.start()
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.live.path}"

    def start(self) -> None:
        self._wanted.set()

    def wait(self) -> None:
        eventually(lambda: self._child is not None and self._child.poll() is None, "it is launched")
        assert self._child is not None
        wait_until_ready(self.live, self.port, self._child)

    def kill(self) -> None:
        assert self._child is not None
        self._kill_all()
        self._child.wait()

    def halt(self) -> None:
        """End the server and do not start it again."""
        self._wanted.clear()
        if self._child is not None:
            stop(self._child)
            self._kill_all()

    def close(self) -> None:
        self._over.set()
        self.halt()
        self._wanted.set()
        self._thread.join()
        self.halt()

    def lines(self) -> list[list[str]]:
        return [line.split(" ", 2) for line in self._journal.read_text().splitlines()] if self._journal.exists() else []

    def times(self, what: str, word: str) -> list[float]:
        return [float(at) for at, happened, of in self.lines() if (happened, of) == (what, word)]

    def _kill_all(self) -> None:
        """Kill all processes of the server, as systemd does: some servers start workers in separate sessions."""
        mark = f"LIVE_GROUP={self._group}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)

    def _supervise(self) -> None:
        while self._wanted.wait() and not self._over.is_set():
            child = launch(self.live, self._binaries, self.port, **self._env)
            self._group.write_text(str(child.pid))
            self._child = child
            child.wait()
            self._kill_all()
            self._over.wait(RESTARTED_AFTER_S)


class Played:
    """A model with one supervised server, and what its scenes ask of it."""

    def __init__(self, cluster: Cluster, server: Supervised) -> None:
        self.cluster, self.server = cluster, server
        self.model = f"scene-{server.live}-{time.time_ns():x}"
        config: dict[str, Any] = {
            "preset": server.live.preset,
            "max_poll_time": 60,
            "retry_backoff": 0.1,
            "max_retries": 1,
        }
        if server.live.described:
            config = {
                "preset": "generic-sync",
                "max_poll_time": 60,
                "max_retries": 1,
                "description": server.live.described,
            }
        if server.live.preset.endswith("-task"):
            config["poll_interval"] = 0.2
        self.configure(config)
        body = {"model": self.model, "server": f"{self.model}-s", "endpoint": server.endpoint, "slots": 1}
        response = cluster.api.call("POST", "/admin/register", json=body)
        assert response.ok, response.text

    def configure(self, config: dict[str, Any]) -> None:
        response = self.cluster.api.call("PUT", f"/admin/model-configs/{self.model}", json=config)
        assert response.ok, response.text

    def submit(self, word: str, sleep: float = 0, **fields: Any) -> str:
        return self.cluster.api.submit(self.model, prompt(word, sleep), **fields)

    def begun(self, word: str) -> None:
        eventually(lambda: self.server.times("begins", word), f"{word} begins", 60)

    def freed_within(self, first: str, following: str) -> float:
        """Seconds from the end of the first run to the begin of the following job, which must not be before."""
        self.begun_or_idle(first, following)
        (began,) = self.server.times("begins", following)
        ended = self.server.times("ends", first)
        assert ended and ended[0] <= began, f"two at once: {self.server.lines()}"
        return began - ended[0]

    def begun_or_idle(self, first: str, following: str) -> None:
        eventually(lambda: self.server.times("ends", first), f"{first} ends", LONG_S + 10)
        try:
            eventually(lambda: self.server.times("begins", following), "", _IDLE_AFTER_S)
        except AssertionError:
            explained = self.cluster.api.call("GET", f"/queue/jobs?model={self.model}").text[:300]
            raise AssertionError(f"idle: {following} has not begun {_IDLE_AFTER_S:g} s later: {explained}") from None


@pytest.fixture(scope="module", params=[one for one in wanted() if one.payloads is WORDS], ids=str)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    made = Supervised(request.param, tmp_path_factory.mktemp("scene"))
    try:
        made.wait()
        yield made
    finally:
        made.close()


@pytest.fixture
def played(cluster: Cluster, server: Supervised) -> Iterator[Played]:
    cluster.ensure_workers(1)
    server.start()
    server.wait()
    made = Played(cluster, server)
    yield made
    with suppress(requests.RequestException):
        cluster.api.call("DELETE", f"/admin/servers/{made.model}-s?force=true")


@pytest.fixture
def note(request: pytest.FixtureRequest, server: Supervised) -> Callable[[str], None]:
    """Write a scene's result into the table; a scene that says nothing has failed."""
    scene = request.node.originalname.removeprefix("test_").split("_")[0].upper()
    properties = request.node.user_properties
    properties.append((SCENE, (str(server.live), scene, "**failed**")))

    def store_result(result: str) -> None:
        properties[:] = [(SCENE, (str(server.live), scene, result))]

    return store_result


def test_n_a_job_is_completed(played: Played, note: Callable[[str], None]):
    job = played.submit("a cat")
    shown = played.cluster.api.ended(job)
    assert shown["status"] == "completed" and shown["result"] == played.server.live.result
    note("ok")


def test_c_the_slot_of_a_canceled_run_is_soon_reused(played: Played, note: Callable[[str], None]):
    job = played.submit("canceled", LONG_S)
    played.begun("canceled")
    assert played.cluster.api.call("POST", f"/queue/jobs/{job}/cancel").ok
    following = played.submit("after cancel")
    played.cluster.until(job, "canceled", 20)
    took = played.freed_within("canceled", "after cancel")
    played.cluster.until(following, "completed", 20)
    note(f"ok {took:.1f} s")


def test_d_the_slot_of_a_run_that_timed_out_is_soon_reused(played: Played, note: Callable[[str], None]):
    job = played.submit("late", LONG_S, ttl=2)
    played.begun("late")
    following = played.submit("after late")
    played.cluster.until(job, "expired", 20)
    took = played.freed_within("late", "after late")
    played.cluster.until(following, "completed", 20)
    note(f"ok {took:.1f} s")


def test_f_the_error_quotes_the_server(played: Played, note: Callable[[str], None]):
    job = played.submit("boom")
    row = played.cluster.until(job, "dead", 30)
    message = row.error_message or ""
    assert message and not re.fullmatch(r"the server answered \d+\W*", message), f"no words of the server: {message!r}"
    note(f"ok: {message[:60]}")


def test_h_a_restart_under_load_ends_every_job_once(played: Played, note: Callable[[str], None]):
    jobs = [played.submit(f"load {n}", 0.3) for n in range(12)]
    played.begun("load 3")
    played.server.kill()
    rows = [played.cluster.until(job, "completed", 60) for job in jobs]
    assert sum(row.failures for row in rows) == 0, f"wrong charge: {[row.failures for row in rows]} retries"
    assert sum(row.crashes for row in rows) <= 1, f"wrong charge: {[row.crashes for row in rows]} crashes"
    note(f"ok, {sum(row.crashes for row in rows)} crash")


def test_r_a_graceful_restart_of_the_worker_runs_no_job_twice_at_once(played: Played, note: Callable[[str], None]):
    job = played.submit("restart", LONG_S)
    played.begun("restart")
    (worker,) = played.cluster.ensure_workers(1)
    worker.stop()
    played.cluster.ensure_workers(1)
    row = played.cluster.until(job, "completed", 150)
    happened = [what for _, what, word in played.server.lines() if word == "restart"]
    assert happened == ["begins", "ends"] * (len(happened) // 2), f"two at once: {played.server.lines()}"
    assert (row.failures, row.crashes) == (0, 0), f"wrong charge: {row.failures} retries, {row.crashes} crashes"
    note(f"ok, {len(happened) // 2} runs")


def test_s_waiting_jobs_spend_no_retry_while_their_server_starts(played: Played, note: Callable[[str], None]):
    played.server.halt()
    jobs = [played.submit(f"wait {n}") for n in range(40)]
    played.server.start()
    rows = [played.cluster.until(job, "completed", 90) for job in jobs]
    charged = [(row.failures, row.crashes) for row in rows if row.failures or row.crashes]
    assert not charged, f"wrong charge: {charged}"
    note("ok")


def test_x_a_job_that_kills_its_server_is_dead_after_three_kills(played: Played, note: Callable[[str], None]):
    before = len(played.server.times("begins", "die"))
    job = played.submit("die")
    began = time.monotonic()
    row = played.cluster.until(job, "dead", 120)
    took = time.monotonic() - began
    killed = len(played.server.times("begins", "die")) - before
    assert (row.failures, row.crashes, killed) == (0, 3, 3), (
        f"wrong charge: {row.failures} retries, {row.crashes} crashes, {killed} kills: {row.error_message}"
    )
    following = played.submit("after poison")
    played.cluster.until(following, "completed", 60)
    note(f"ok {took:.0f} s")
