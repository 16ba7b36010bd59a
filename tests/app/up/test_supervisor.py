"""The supervisor, with small programs as its children and real signals."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.up import launcher
from app.up.errors import Stopped, UpError
from app.up.launcher import start_staggered
from app.up.managed_process import Role
from app.up.ports import free_port, is_open
from app.up.supervisor import how_it_ended, restart_delay_s
from tasks import process_files
from tests.app.up.tiny_programs import Bench, lives, until

# Says its number, then stays, and leaves a trace when it is asked to end.
STAYS = 'echo $$ >> {0}.pids; trap "echo {0} >> ended; exit" TERM; while :; do sleep 0.02; done'
DEAF = 'echo $$ >> {0}.pids; trap "" TERM; while :; do sleep 0.02; done'


def pids(bench: Bench, name: str) -> list[int]:
    return [int(line) for line in bench.lines(f"{name}.pids")]


def test_children_are_stopped_in_their_stop_order(bench: Bench) -> None:
    for name, turn in (("valkey", 3), ("worker", 1), ("web", 0), ("flower", 2)):
        bench.start(name, STAYS.format(name), stop_order=turn)
    bench.until(lambda: all(pids(bench, name) for name in ("valkey", "worker", "web", "flower")))
    assert bench.supervisor.stop() == []
    assert bench.lines("ended") == ["web", "worker", "flower", "valkey"]
    assert bench.supervisor.running == []


def test_a_child_that_does_not_end_in_time_is_killed_with_its_descendants(bench: Bench) -> None:
    bench.start(
        "deaf",
        'sh -c "trap \\"\\" TERM; echo \\$\\$ >> deaf.pids; sleep 60" & ' + DEAF.format("deaf"),
        stop_timeout_s=0.2,
    )
    bench.until(lambda: len(pids(bench, "deaf")) == 2)
    assert bench.supervisor.stop() == ["deaf"]
    until(lambda: not any(lives(pid) for pid in pids(bench, "deaf")))


def test_the_supervisor_restarts_a_dead_child_and_reports_the_restart(bench: Bench) -> None:
    bench.start("worker", STAYS.format("worker"))
    bench.until(lambda: pids(bench, "worker"))
    bench.supervisor.restarts = True
    os.kill(pids(bench, "worker")[0], signal.SIGKILL)
    bench.until(lambda: len(pids(bench, "worker")) == 2, "the restart")
    assert lives(pids(bench, "worker")[1])
    assert "worker ended (killed by SIGKILL); it starts again in 0.5 s" in bench.messages[0]


def test_the_supervisor_waits_for_a_role_that_exits_and_never_restarts_it(bench: Bench) -> None:
    bench.supervisor.run_to_end(Role("migrate", "echo once >> done", exits=True))
    assert bench.lines("done") == ["once"] and bench.supervisor.running == []
    bench.supervisor.restarts = True
    bench.start("worker", STAYS.format("worker"))
    bench.until(lambda: pids(bench, "worker"))
    assert bench.lines("done") == ["once"] and bench.messages == []


def test_a_command_that_fails_raises_an_error_with_its_last_output(bench: Bench) -> None:
    with pytest.raises(UpError, match=r"migrate ended \(exit status 1\).*Error: no such file"):
        bench.supervisor.run_to_end(Role("migrate", 'sh -c "echo Error: no such file; exit 1"', exits=True))


def test_the_descendants_of_a_dead_child_are_ended_before_it_restarts(bench: Bench) -> None:
    bench.start("web", "sleep 60 & echo $! >> left.pids; " + STAYS.format("web"))
    bench.until(lambda: pids(bench, "web"))
    bench.supervisor.restarts = True
    os.kill(pids(bench, "web")[0], signal.SIGKILL)
    bench.until(lambda: len(pids(bench, "web")) == 2)
    until(lambda: not lives(pids(bench, "left")[0]))


def test_a_child_that_dies_during_the_start_raises_an_error_with_its_last_output(bench: Bench) -> None:
    bench.start("web", "echo no such module >&2; exit 3")
    with pytest.raises(UpError, match=r"web ended \(exit status 3\) while it started: no such module"):
        bench.supervisor.wait(lambda: False, 20, "nothing")


def test_the_error_of_a_failed_start_quotes_the_line_with_the_exception(bench: Bench) -> None:
    bench.start("web", "echo Starting; echo \\ \\ raise ImportError; echo ImportError: no flask; echo Goodbye; exit 1")
    with pytest.raises(UpError, match="while it started: ImportError: no flask "):
        bench.supervisor.wait(lambda: False, 20, "nothing")


def test_waiting_ends_with_an_error_when_time_is_up(bench: Bench) -> None:
    with pytest.raises(UpError, match="Valkey did not answer within 0 s"):
        bench.supervisor.wait(lambda: False, 0.1, "Valkey did not answer")


@pytest.fixture
def begins(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A script that stays, and shows that it has begun when there is a file `<name>.go`."""
    monkeypatch.setenv("SLOTKEEPER_HOME", str(bench.folder))
    (bench.folder / "secret").touch()
    shown = process_files.own_file("worker").parent
    shown.mkdir()
    sign = f"{shown}/{{0}}.{socket.gethostname()}.$$"
    return f"echo {{0}} >> begun; until [ -e {{0}}.go ]; do sleep 0.02; done; touch {sign}; {STAYS}".format


def test_no_more_processes_start_at_once_than_the_limit_allows(bench: Bench, begins: Callable[[str], str]) -> None:
    """The first processes are ready before the next ones start."""
    names = ["worker", "maintenance", "web", "flower"]
    roles = [Role(name, f"sh -c '{begins(name)}'") for name in names]
    waits: list[list[str]] = []

    def let_go() -> None:
        for name in names:
            until(lambda: len(bench.lines("begun")) == min(len(waits) + 2, 4))
            waits.append(bench.lines("begun"))
            (bench.folder / f"{name}.go").touch()

    thread = threading.Thread(target=let_go)
    thread.start()
    start_staggered(roles, bench.supervisor, at_once=2)
    thread.join()
    assert [set(begun) for begun in waits] == [set(names[:2]), set(names[:3]), set(names), set(names)]
    assert bench.supervisor.running == names


def test_the_file_of_a_killed_process_with_the_same_pid_does_not_count_as_a_start(
    bench: Bench, begins: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of a container get the same pids at each start."""
    start = bench.supervisor.start

    def start_after_another(role: Role) -> None:
        start(role)
        process_files.own_file(role.name).with_suffix(f".{bench.supervisor.pid(role)}").touch()

    monkeypatch.setattr(bench.supervisor, "start", start_after_another)
    monkeypatch.setattr(launcher, "_START_S", 0.2)
    with pytest.raises(UpError, match="worker did not begin within"):
        start_staggered([Role("worker", f"sh -c '{begins('worker')}'")], bench.supervisor, at_once=1)


def test_a_process_with_a_port_counts_as_started_when_it_listens(bench: Bench) -> None:
    port = free_port()
    listens = "import socket, time; it = socket.create_server(('127.0.0.1', {port})); time.sleep(60)"
    role = Role("flower", f'"{sys.executable}" -c "{listens.format(port=port)}"', port)
    start_staggered([role], bench.supervisor, at_once=1)
    assert is_open("127.0.0.1", port)


def test_a_stop_signal_during_the_start_of_processes_stops_the_start(
    bench: Bench, begins: Callable[[str], str]
) -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(Stopped):
        start_staggered([Role("worker", f"sh -c '{begins('worker')}'")], bench.supervisor, at_once=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_watch(bench: Bench, number: int) -> None:
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    with pytest.raises(Stopped):
        bench.supervisor.supervise()


def test_a_signal_that_arrived_before_supervise_stops_it_too(bench: Bench) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Stopped):
        bench.supervisor.supervise()


def test_a_stop_signal_is_handled_while_threads_keep_the_interpreter_busy(bench: Bench) -> None:
    done = threading.Event()

    def burn() -> None:
        while not done.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=burn) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        threading.Timer(0.1, signal.pthread_kill, (threads[0].ident, signal.SIGTERM)).start()
        with pytest.raises(Stopped):
            bench.supervisor.supervise()
    finally:
        done.set()


def test_run_beside_returns_the_result_or_raises_the_error_of_its_function(bench: Bench) -> None:
    assert bench.supervisor.run_beside(lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        bench.supervisor.run_beside(lambda: 1 // 0)


def test_work_beside_it_does_not_delay_a_stop(bench: Bench) -> None:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        bench.supervisor.run_beside(lambda: threading.Event().wait(20))
    assert time.monotonic() - began < 10


def test_a_second_signal_shortens_the_stop_except_for_processes_that_keep_state(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.up.supervisor._HASTE_AFTER_S", 0.1)
    bench.start("worker", DEAF.format("worker"), stop_order=1, stop_timeout_s=60)
    bench.start("valkey", STAYS.format("valkey"), stop_order=2, stops_last=True)
    bench.until(lambda: pids(bench, "worker") and pids(bench, "valkey"))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert bench.supervisor.stop() == ["worker"]
    assert bench.lines("ended") == ["valkey"]


def test_a_log_does_not_grow_without_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.up.managed_process._LARGEST_LOG", 1000)
    monkeypatch.setattr("app.up.supervisor._LOGS_EVERY_S", 0.05)
    bench.start("talks", "while :; do echo a line of a log; sleep 0.001; done")
    bench.until(lambda: (bench.folder / "logs" / "talks.log.1").exists())
    bench.until(lambda: (bench.folder / "logs" / "talks.log").stat().st_size < 1000)


def test_a_stop_signal_during_the_start_of_a_thread_is_no_error_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler raises Stopped at whatever line the program executes."""
    begin, begun = threading._start_new_thread, threading.Event()  # type: ignore[attr-defined]

    def stopped_meanwhile(*arguments: object) -> None:
        begin(*arguments)
        assert begun.wait(10)
        raise Stopped

    monkeypatch.setattr(threading, "_start_new_thread", stopped_meanwhile)
    with pytest.raises(Stopped):
        threading.Thread(target=begun.set, daemon=True).start()


def test_children_end_even_when_the_parent_is_killed(tmp_path: Path) -> None:
    program = f"""
import os, pathlib, time
from app.up.managed_process import Role
from app.up.guardian import Guardian
from app.up.supervisor import Signals
from app.up.supervisor import Supervisor
with Signals() as signals, Guardian() as guardian:
    folder = pathlib.Path({str(tmp_path)!r})
    supervisor = Supervisor(signals, guardian, os.environ, folder, folder, print)
    supervisor.start(Role("child", "sh -c 'echo $$ > pid; sleep 60 & wait'"))
    (folder / "started").touch()
    supervisor.supervise()
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), "the child's start")
        until((tmp_path / "started").exists, "the guardian's knowing of it")
        child = int((tmp_path / "pid").read_text())
        assert lives(child)
    finally:
        parent.kill()
        parent.wait()
    until(lambda: not lives(child), "the end of the child")


def test_restart_delays_grow_and_allow_at_most_five_restarts_a_minute() -> None:
    now, restarts, delays = 100.0, [], []
    for _ in range(7):
        delays.append(restart_delay_s(restarts, now))
        now += delays[-1]
        restarts.append(now)
    assert delays[:5] == [0.5, 1, 2, 4, 8]
    assert all(later - earlier >= 60 for earlier, later in zip(restarts, restarts[5:], strict=False))


def test_a_restart_more_than_a_minute_ago_does_not_count() -> None:
    assert restart_delay_s([10.0], now_s=75.0) == 0.5


@pytest.mark.parametrize(("status", "words"), [(0, "exit status 0"), (-9, "killed by SIGKILL"), (-99, "signal 99")])
def test_an_exit_status_is_described_in_words(status: int, words: str) -> None:
    assert words in how_it_ended(status)
