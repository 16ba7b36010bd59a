"""Processes say that they live, and are missed when they do not; a canary tells whether a worker works."""

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
from tests.support.room import FRAGMENTS


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("home", "shared"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))


@pytest.fixture
def worker(api: Api) -> Iterator[Worker]:
    made = Worker(api.dispatcher, services.workers(), services.progress_scripts(), max_runs=4)
    made.heartbeat.end()
    yield made
    made.close()


def _a_process(role: str, **facts: Any) -> ProcessReport:
    one = ProcessReport(role, services.processes(), lambda: facts)
    one.report()
    return one


# -- the list --------------------------------------------------------------------------------------------------


def test_who_says_that_it_lives_is_listed_and_who_leaves_is_not(api: Api) -> None:
    web, worker = _a_process("web"), _a_process("worker", runs=2, capacity=8, canary_ms=1.5, canary_age_ms=1000)
    found = api.client.get("/admin/processes").json["processes"]
    assert [(it["role"], it["pid"], it["lives"]) for it in found] == [
        ("web", os.getpid(), True),
        ("worker", os.getpid(), True),
    ]
    assert (found[1]["runs"], found[1]["capacity"], found[1]["canary_ms"]) == (2, 8, 1.5)
    worker.end()
    web.end()
    assert api.client.get("/admin/processes").json["processes"] == []


def _at(api: Api, now_ms: int) -> ProcessList:
    with api.valkey.client() as redis:
        redis.set("clock:{test:processes}", now_ms)
    return ProcessList(make_scripts(services.scripts().redis, Keys("test"), FRAGMENTS))


def test_who_says_nothing_is_taken_for_dead_and_then_forgotten(api: Api) -> None:
    _at(api, 1_000_000).report("worker@a/1", {"role": "worker", "host": "a"})
    (found,) = _at(api, 1_000_000 + process_list.DEAD_AFTER_MS - 1).read_all()
    assert found.is_alive
    (found,) = _at(api, 1_000_000 + process_list.DEAD_AFTER_MS).read_all()
    assert not found.is_alive
    assert _at(api, 1_000_001 + process_list.SHOWN_MS).read_all() == []


def test_the_list_is_bounded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_list, "MAX_PROCESSES", 2)
    said = _at(api, 1_000_000)
    for n in range(4):
        said.report(f"web@a/{n}", {"role": "web", "host": "a"})
    assert [it.name for it in said.read_all()] == ["web@a/0", "web@a/1"]
    said.report("web@a/0", {"role": "web", "host": "b"})
    assert [it.host for it in said.read_all()] == ["a", "b"], "who is in it already is heard"


# -- liveness --------------------------------------------------------------------------------------------------


def test_a_process_lives_as_long_as_it_turns_whatever_is_away(mortal_api: Api) -> None:
    assert liveness.liveness_problem("worker")
    one = ProcessReport("worker", services.processes(), dict)
    one.start_reporting()
    mortal_api.valkey.kill()
    one.report()
    assert liveness.liveness_problem("worker") is None
    assert liveness.liveness_problem("beat"), "another role's process is none of this one"
    one.end()
    assert liveness.liveness_problem("worker")


def test_a_process_that_turns_no_more_does_not_live(api: Api) -> None:
    one = ProcessReport("beat", services.processes(), dict)
    one.start_reporting()
    one._ended.set()
    assert one._file is not None
    one.report()
    before = time.time() - process_files.STALE_S - 1
    os.utime(one._file, (before, before))
    assert liveness.liveness_problem("beat")
    process_files.remove_old(one._file.parent)
    assert not one._file.exists()


def test_a_link_of_the_folders_name_is_neither_emptied_nor_written_to_nor_believed(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the system's folder anybody may put one, which leads to a folder of this user."""
    mine, link = tmp_path / "mine", tmp_path / "link"
    mine.mkdir(mode=0o700)
    link.symlink_to(mine)
    names = {f"web.{socket.gethostname()}.{os.getpid()}", "thesis.txt", f"web.{socket.gethostname()}.1"}
    for name in names:
        (mine / name).touch()
        os.utime(mine / name, (0, 0))
    monkeypatch.setattr(process_files, "_folders", lambda: (link, link))
    one = ProcessReport("web", services.processes(), dict)
    one.start_reporting()
    one.report()
    assert {file.name for file in mine.iterdir()} == names
    assert not process_files.has_started("web", os.getpid()) and process_files.live_pids("web") == []
    process_files.remove_old(mine)
    assert {file.name for file in mine.iterdir()} == {"thesis.txt"}, "of a folder of ours, what has such a name"
    one.end()


def test_a_process_has_begun_when_it_has_shown_so(api: Api) -> None:
    one = ProcessReport("web", services.processes(), dict)
    assert not process_files.has_started("web", os.getpid())
    one.start_reporting()
    one.report()
    assert process_files.has_started("web", os.getpid())
    assert not process_files.has_started("worker", os.getpid())
    process_files.remove_stale("web", os.getpid())
    assert not process_files.has_started("web", os.getpid())
    one.report()
    assert process_files.has_started("web", os.getpid())
    one.end()


def test_a_process_has_begun_though_the_clock_was_set_back_meanwhile(api: Api) -> None:
    one = ProcessReport("web", services.processes(), dict)
    one.start_reporting()
    one.report()
    assert one._file is not None
    os.utime(one._file, (0, 0))
    assert process_files.has_started("web", os.getpid())
    one.end()


@pytest.mark.parametrize(("a_state_folder", "used"), [(True, "home"), (False, "shared")])
def test_signs_of_life_lie_in_the_state_folder_if_there_is_one_and_the_last_to_leave_clears_them(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, a_state_folder: bool, used: str
) -> None:
    (tmp_path / "home" / "secret").touch()
    if not a_state_folder:
        monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path / "none"))
    before = list((tmp_path / used).iterdir())
    one, another = ProcessReport("web", services.processes(), dict), ProcessReport("beat", services.processes(), dict)
    for each in (one, another):
        each.start_reporting()
        each.report()
    assert one._file is not None and (tmp_path / used) in one._file.parents
    one.end()
    assert liveness.liveness_problem("beat") is None
    another.end()
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
def test_a_worker_is_ready_when_a_canary_went_through_it_lately(
    api: Api, facts: dict[str, Any], problem: str | None
) -> None:
    _a_process("worker", **facts)
    why = liveness.readiness_problem("worker")
    assert why is None if problem is None else problem in str(why)


def test_who_says_nothing_is_not_ready(api: Api) -> None:
    assert "has reported lately" in str(liveness.readiness_problem("web"))
    _a_process("web")
    assert liveness.readiness_problem("web") is None


def test_maintenance_is_ready_while_it_sweeps(api: Api) -> None:
    from routing.maintenance import task_runs

    _a_process("maintenance")
    assert "swept" in str(liveness.readiness_problem("maintenance"))
    task_runs.mark_sweep(services.scripts())
    assert liveness.readiness_problem("maintenance") is None


def test_maintenance_is_not_ready_while_a_frequent_task_does_not_come_to_its_end(api: Api) -> None:
    from routing.maintenance import task_runs

    scripts = services.scripts()
    _a_process("maintenance")
    task_runs.mark_sweep(scripts)

    def ended_ago(name: str, ago_s: float) -> None:
        scripts.redis.hset(scripts.keys.tasks(), name, f"{now_ms() - int(ago_s * 1000)} 0.001")

    ended_ago("reap", 20)
    ended_ago("check_invariants", 10_000)
    assert liveness.readiness_problem("maintenance") is None, "a rare task may not have run since a new start"
    ended_ago("reap", 40)
    assert "finished for a long time: reap" in str(liveness.readiness_problem("maintenance"))
    assert "finished for a long time: reap" in str(readiness.probe_maintenance())


def test_the_command_says_why_and_fails(api: Api) -> None:
    done = CliRunner().invoke(main, ["health", "worker"])
    assert (done.exit_code, "has reported lately" in done.output) == (1, True)
    _a_process("worker", canary_age_ms=0)
    assert CliRunner().invoke(main, ["health", "worker"]).exit_code == 0


# -- the canary ------------------------------------------------------------------------------------------------


def test_a_canary_that_has_come_is_timed(api: Api, worker: Worker) -> None:
    one = Canary(worker.worker_loop, services.workers())
    assert one.facts() == {"canary_ms": None, "canary_age_ms": None}
    one._sent["x"] = time.monotonic() - 0.25
    one.receive("x")
    assert one.facts()["canary_ms"] >= 250
    assert one.facts()["canary_age_ms"] < 10_000


def test_a_canary_of_another_process_is_not_counted(api: Api, worker: Worker) -> None:
    one = Canary(worker.worker_loop, services.workers())
    one.receive("another's")
    assert one.facts()["canary_ms"] is None


@pytest.mark.parametrize("away", ["redis", "record"])
def test_a_canary_that_does_not_reach_redis_and_the_record_has_not_come(
    api: Api, worker: Worker, away: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(worker.worker_loop, "redis" if away == "redis" else "commit", fails)
    one = Canary(worker.worker_loop, services.workers())
    one._sent["x"] = time.monotonic()
    with pytest.raises(ConnectionError):
        one.receive("x")
    assert one.facts()["canary_ms"] is None


@pytest.mark.parametrize("comes", ["before", "after"])
def test_a_canary_does_not_keep_its_worker_from_its_end(
    api: Api, worker: Worker, comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that has begun just now sends one at once, and Celery waits for it."""
    asked = threading.Event()

    async def says_nothing(_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(worker.worker_loop, "redis", says_nothing)
    monkeypatch.setattr(canary, "_MAX_AGE_S", 3600.0)
    one = Canary(worker.worker_loop, services.workers())
    one._sent["x"] = time.monotonic()
    coming = threading.Thread(target=one.receive, args=("x",), daemon=True)
    if comes == "before":
        coming.start()
        assert asked.wait(10)
    worker.close()
    if comes == "after":
        coming.start()
    coming.join(10)
    assert not coming.is_alive()
    assert one.facts()["canary_ms"] is None


def test_canaries_are_sent_at_intervals_and_to_their_own_worker(
    api: Api, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(canary.canary, "apply_async", lambda args, queue, **_: sent.append(queue.name))
    monkeypatch.setattr(canary, "publish_queue", lambda: type("Now", (), {"put": staticmethod(lambda act: act())}))
    one = Canary(worker.worker_loop, services.workers())
    one.send_if_due()
    assert sent == [], "it has no queue before its worker takes messages"
    one.make_queue("worker@host")
    one.send_if_due()
    one.send_if_due()
    assert sent == ["canary.worker@host"]


def test_a_worker_takes_canaries_only_once_its_consumer_can_receive(api: Api, worker: Worker) -> None:
    """A broker that pushes delivers while the consumer is being set up, and a message without a callback ends it."""
    due: list[Callable[[], object]] = []
    consumed: list[str] = []
    hub = SimpleNamespace(call_soon=lambda act, *args: due.append(partial(act, *args)))
    consumer = SimpleNamespace(hostname="worker@host", hub=hub, add_task_queue=consumed.append)
    canary.consume(Canary(worker.worker_loop, services.workers()), consumer)
    assert consumed == []
    for act in due:
        act()
    assert consumed == ["canary.worker@host"]
