"""Liveness and readiness of the processes, and the canaries of the workers."""

import asyncio
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from app import readiness
from app.cli.__main__ import main
from routing.maintenance import task_runs
from routing.queries import process_list
from routing.queries.process_list import ProcessList
from routing.scripts import make_scripts
from slotkeeper.clock import now_ms
from slotkeeper.redis.keys import Keys
from tasks import liveness, process_files, services
from tasks.extensions import canary
from tasks.extensions.canary import Canary
from tasks.liveness import ProcessReport
from tasks.worker.worker import Worker
from tests.support.api import Api
from tests.support.builders import eventually
from tests.support.fleet_queue import FRAGMENTS


@pytest.fixture(autouse=True)
def _separate_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("home", "shared"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))


@pytest.fixture
def worker(api: Api) -> Iterator[Worker]:
    worker = Worker(api.dispatcher, services.workers(), services.progress_scripts(), max_runs=4)
    worker.heartbeat.end()
    yield worker
    worker.close()


def _report_once(role: str, **facts: Any) -> ProcessReport:
    report = ProcessReport(role, services.processes(), lambda: facts)
    report.report()
    return report


# -- the list --------------------------------------------------------------------------------------------------


def test_a_process_is_listed_from_its_first_report_until_it_ends(api: Api) -> None:
    web, worker = _report_once("web"), _report_once("worker", runs=2, capacity=8, canary_ms=1.5, canary_age_ms=1000)
    listed = api.client.get("/admin/processes").json["processes"]
    assert [(process["role"], process["pid"], process["alive"]) for process in listed] == [
        ("web", os.getpid(), True),
        ("worker", os.getpid(), True),
    ]
    assert (listed[1]["runs"], listed[1]["capacity"], listed[1]["canary_ms"]) == (2, 8, 1.5)
    worker.end()
    web.end()
    assert api.client.get("/admin/processes").json["processes"] == []


def _list_at(api: Api, now_ms: int) -> ProcessList:
    """Return the list of processes, whose clock in Redis is set to `now_ms`."""
    with api.valkey.client() as redis:
        redis.set("clock:{test:processes}", now_ms)
    return ProcessList(make_scripts(services.scripts().redis, Keys("test"), FRAGMENTS))


def test_a_silent_process_counts_as_dead_and_is_removed_later(api: Api) -> None:
    _list_at(api, 1_000_000).report("worker@a/1", {"role": "worker", "host": "a"})
    (process,) = _list_at(api, 1_000_000 + process_list.DEAD_AFTER_MS - 1).read_all()
    assert process.is_alive
    (process,) = _list_at(api, 1_000_000 + process_list.DEAD_AFTER_MS).read_all()
    assert not process.is_alive
    assert _list_at(api, 1_000_001 + process_list.SHOWN_MS).read_all() == []


def test_the_list_is_bounded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_list, "MAX_PROCESSES", 2)
    processes = _list_at(api, 1_000_000)
    for n in range(4):
        processes.report(f"web@a/{n}", {"role": "web", "host": "a"})
    assert [process.name for process in processes.read_all()] == ["web@a/0", "web@a/1"]
    processes.report("web@a/0", {"role": "web", "host": "b"})
    assert [process.host for process in processes.read_all()] == ["a", "b"], "a listed process can report again"


# -- liveness --------------------------------------------------------------------------------------------------


def test_a_running_process_is_alive_although_redis_is_down(mortal_api: Api) -> None:
    assert process_files.liveness_problem("worker")
    report = ProcessReport("worker", services.processes(), dict)
    report.start_reporting()
    mortal_api.valkey.kill()
    report.report()
    assert process_files.liveness_problem("worker") is None
    assert process_files.liveness_problem("beat"), "a process of another role does not count"
    report.end()
    assert process_files.liveness_problem("worker")


def test_a_process_that_no_longer_touches_its_file_is_not_alive(api: Api) -> None:
    report = ProcessReport("beat", services.processes(), dict)
    report.start_reporting()
    report._ended.set()
    eventually(lambda: all(thread.name != "liveness" for thread in threading.enumerate()))
    assert report._file is not None
    report.report()
    stale_s = time.time() - process_files.STALE_S - 1
    os.utime(report._file, (stale_s, stale_s))
    assert process_files.liveness_problem("beat")
    process_files.remove_old(report._file.parent)
    assert not report._file.exists()


def test_a_symbolic_link_in_place_of_the_folder_is_neither_read_nor_written_nor_cleaned(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the system's folder any user can create such a link to a folder of this user."""
    mine, link = tmp_path / "mine", tmp_path / "link"
    mine.mkdir(mode=0o700)
    link.symlink_to(mine)
    names = {f"web.{socket.gethostname()}.{os.getpid()}", "thesis.txt", f"web.{socket.gethostname()}.1"}
    for name in names:
        (mine / name).touch()
        os.utime(mine / name, (0, 0))
    monkeypatch.setattr(process_files, "_folders", lambda: (link, link))
    report = ProcessReport("web", services.processes(), dict)
    report.start_reporting()
    report.report()
    assert {file.name for file in mine.iterdir()} == names
    assert not process_files.has_started("web", os.getpid()) and process_files.live_pids("web") == []
    process_files.remove_old(mine)
    assert {file.name for file in mine.iterdir()} == {"thesis.txt"}, "in a folder of this user, only process files"
    report.end()


def test_a_process_has_started_when_its_file_exists(api: Api) -> None:
    report = ProcessReport("web", services.processes(), dict)
    assert not process_files.has_started("web", os.getpid())
    report.start_reporting()
    report.report()
    assert process_files.has_started("web", os.getpid())
    assert not process_files.has_started("worker", os.getpid())
    process_files.remove_stale("web", os.getpid())
    assert not process_files.has_started("web", os.getpid())
    report.report()
    assert process_files.has_started("web", os.getpid())
    report.end()


def test_a_process_has_started_although_its_process_file_is_old(api: Api) -> None:
    report = ProcessReport("web", services.processes(), dict)
    report.start_reporting()
    report.report()
    assert report._file is not None
    os.utime(report._file, (0, 0))
    assert process_files.has_started("web", os.getpid())
    report.end()


@pytest.mark.parametrize(("has_state_folder", "used"), [(True, "home"), (False, "shared")])
def test_process_files_are_in_the_state_folder_if_it_exists_and_the_last_process_removes_their_folder(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_state_folder: bool, used: str
) -> None:
    (tmp_path / "home" / "secret").touch()
    if not has_state_folder:
        monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path / "none"))
    before = list((tmp_path / used).iterdir())
    web, beat = ProcessReport("web", services.processes(), dict), ProcessReport("beat", services.processes(), dict)
    for report in (web, beat):
        report.start_reporting()
        report.report()
    assert web._file is not None and (tmp_path / used) in web._file.parents
    web.end()
    assert process_files.liveness_problem("beat") is None
    beat.end()
    assert list((tmp_path / used).iterdir()) == before


# -- readiness -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts, problem",
    [
        ({"canary_age_ms": 3_000}, None),
        ({"canary_age_ms": 30_000}, "No canary has come through"),
        ({"canary_age_ms": None}, "No canary has come through"),
        ({"canary_age_ms": 3_000, "takes": False}, "takes no more jobs"),
    ],
)
def test_a_worker_is_ready_if_it_has_received_a_canary_lately(
    api: Api, facts: dict[str, Any], problem: str | None
) -> None:
    _report_once("worker", **facts)
    found = liveness.readiness_problem("worker")
    assert found is None if problem is None else problem in str(found)


def test_a_process_is_ready_only_after_its_first_report(api: Api) -> None:
    assert "has reported lately" in str(liveness.readiness_problem("web"))
    _report_once("web")
    assert liveness.readiness_problem("web") is None


def test_maintenance_is_ready_while_it_sweeps(api: Api) -> None:
    _report_once("maintenance")
    assert "swept" in str(liveness.readiness_problem("maintenance"))
    task_runs.mark_sweep(services.scripts())
    assert liveness.readiness_problem("maintenance") is None


def test_maintenance_is_not_ready_if_a_frequent_task_has_not_finished_lately(api: Api) -> None:
    scripts = services.scripts()
    _report_once("maintenance")
    task_runs.mark_sweep(scripts)

    def store_end(name: str, ago_s: float) -> None:
        scripts.redis.hset(scripts.keys.tasks(), name, f"{now_ms() - int(ago_s * 1000)} 0.001")

    store_end("reap", 20)
    store_end("check_invariants", 10_000)
    assert liveness.readiness_problem("maintenance") is None, "a less frequent task may not have run since a restart"
    store_end("reap", 40)
    assert "finished for a long time: reap" in str(liveness.readiness_problem("maintenance"))
    assert "finished for a long time: reap" in str(readiness.probe_maintenance())


def test_the_health_command_prints_the_problem_and_fails(api: Api) -> None:
    result = CliRunner().invoke(main, ["health", "worker"])
    assert (result.exit_code, "has reported lately" in result.output) == (1, True)
    _report_once("worker", canary_age_ms=0)
    assert CliRunner().invoke(main, ["health", "worker"]).exit_code == 0


# -- the canary ------------------------------------------------------------------------------------------------


def test_the_latency_of_a_received_canary_is_measured(api: Api, worker: Worker) -> None:
    own = Canary(worker.worker_loop, services.workers())
    assert own.facts() == {"canary_ms": None, "canary_age_ms": None}
    own._sent["x"] = time.monotonic() - 0.25
    own.receive("x")
    eventually(lambda: own.facts()["canary_ms"] is not None)
    assert own.facts()["canary_ms"] >= 250
    assert own.facts()["canary_age_ms"] < 10_000


def test_a_canary_of_another_process_is_not_counted(api: Api, worker: Worker) -> None:
    own = Canary(worker.worker_loop, services.workers())
    measured: list[float] = []
    own._measure = measured.append  # type: ignore[method-assign, assignment]
    own.receive("another's")
    assert measured == []


@pytest.mark.parametrize("method", ["redis", "commit"])
def test_a_canary_that_does_not_reach_redis_and_the_database_is_not_counted(
    api: Api, worker: Worker, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = threading.Event()

    async def fails(_: object) -> None:
        called.set()
        raise ConnectionError

    monkeypatch.setattr(worker.worker_loop, method, fails)
    own = Canary(worker.worker_loop, services.workers())
    own._sent["x"] = time.monotonic()
    own.receive("x")
    assert called.wait(10)
    eventually(lambda: not worker.worker_loop._background_tasks)
    assert own.facts()["canary_ms"] is None


def test_a_received_canary_keeps_no_thread_of_celery_waiting(
    api: Api, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker sends a canary as soon as it starts, and Celery waits for the canary's task when the worker stops."""
    called = threading.Event()

    async def never_responds(_: object) -> None:
        called.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(worker.worker_loop, "redis", never_responds)
    own = Canary(worker.worker_loop, services.workers())
    own._sent["x"] = time.monotonic()
    own.receive("x")
    assert called.wait(10)
    worker.close()
    own._sent["y"] = time.monotonic()
    own.receive("y")  # after the loop has ended
    assert own.facts()["canary_ms"] is None


def test_canaries_are_sent_at_intervals_to_the_queue_of_their_worker(
    api: Api, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(canary.canary, "apply_async", lambda args, queue, **_: sent.append(queue.name))
    monkeypatch.setattr(canary, "publish_queue", lambda: type("Now", (), {"put": staticmethod(lambda send: send())}))
    own = Canary(worker.worker_loop, services.workers())
    own.send_if_due()
    assert sent == [], "there is no queue before the worker consumes messages"
    own.make_queue("worker@host")
    own.send_if_due()
    own.send_if_due()
    assert sent == ["canary.worker@host"]


def test_a_worker_consumes_canaries_only_after_its_consumer_has_callbacks(api: Api, worker: Worker) -> None:
    """A broker may deliver while the consumer is being set up, and a message without a callback ends the worker."""
    scheduled: list[Callable[[], object]] = []
    consumed: list[str] = []
    hub = SimpleNamespace(call_soon=lambda call, *args: scheduled.append(partial(call, *args)))
    consumer = SimpleNamespace(hostname="worker@host", hub=hub, add_task_queue=consumed.append)
    canary.consume(Canary(worker.worker_loop, services.workers()), consumer)
    assert consumed == []
    for call in scheduled:
        call()
    assert consumed == ["canary.worker@host"]
