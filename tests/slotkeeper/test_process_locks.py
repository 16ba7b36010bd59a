"""Only the kernel's lock on a process's file proves that the process has ended."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from slotkeeper import process_locks
from slotkeeper.process_locks import ProcessLocks
from slotkeeper.state_folder import StateFolderNotPrivate
from tools.cluster.stack import REPO, eventually

NAME = "worker/00c0ffee"
_BEGIN = """
import os, sys
from pathlib import Path
from slotkeeper.process_locks import ProcessLocks
ProcessLocks(Path(sys.argv[1])).acquire(sys.argv[2])
child = os.fork() if "forks" in sys.argv else 1
print(os.getpid() if child == 0 else 0, flush=True) if "forks" not in sys.argv or child == 0 else None
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "record.db").touch()
    return tmp_path / "workers"


@pytest.fixture
def begin(folder: Path) -> Iterator[Callable[..., tuple["subprocess.Popen[str]", int]]]:
    """Starts a process that begins; answers it, and its child's number if it `forks`."""
    began: list[subprocess.Popen[str]] = []

    def start(*how: str) -> tuple["subprocess.Popen[str]", int]:
        command = [sys.executable, "-c", _BEGIN, str(folder), NAME, *how]
        process = subprocess.Popen(command, cwd=REPO, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        began.append(process)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    yield start
    for process in began:
        process.kill()
        process.communicate()


def _die(lives: ProcessLocks, name: str = NAME) -> None:
    """As the kernel does it for a process that ends."""
    os.close(lives._held.pop(name))


def _one(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_a_process_that_was_killed_is_proved_to_have_ended_and_one_that_is_stopped_is_not(folder, begin):
    process, _ = begin()
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert ProcessLocks(folder).find_dead() == []
    process.kill()
    process.wait()
    assert ProcessLocks(folder).find_dead() == [NAME]
    assert ProcessLocks(folder).find_dead() == [NAME], "until what had to be done is done"
    ProcessLocks(folder).remove(NAME)
    assert ProcessLocks(folder).find_dead() == [] and list(folder.iterdir()) == []


def test_a_child_that_has_its_descriptors_only_delays_the_proof(folder, begin):
    process, child = begin("forks")
    process.kill()
    process.wait()
    assert ProcessLocks(folder).find_dead() == []
    os.kill(child, signal.SIGKILL)
    eventually(lambda: ProcessLocks(folder).find_dead() == [NAME], "the child has ended, too")


def test_a_program_that_a_process_has_started_does_not_hold_its_lock(folder):
    lives = ProcessLocks(folder)
    lives.acquire(NAME)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, close_fds=False):
        _die(lives)
        assert ProcessLocks(folder).find_dead() == [NAME]


def test_a_process_does_not_take_itself_for_dead(folder):
    lives = ProcessLocks(folder)
    lives.acquire(NAME)
    assert lives.find_dead() == ProcessLocks(folder).find_dead() == []


def test_a_process_that_releases_its_lock_leaves_no_file(folder):
    lives = ProcessLocks(folder)
    lives.acquire(NAME)
    lives.release(NAME)
    lives.release(NAME)
    assert lives.find_dead() == [] and list(folder.iterdir()) == []


def test_a_file_of_another_boot_does_not_prove_that_its_process_has_ended(folder, monkeypatch):
    lives = ProcessLocks(folder)
    lives.acquire(NAME)
    _die(lives)
    assert lives.find_dead() == [NAME]
    monkeypatch.setattr(process_locks, "read_boot_id", lambda: "another-start")
    assert lives.find_dead() == []


def test_without_a_boot_id_no_lock_is_acquired_and_no_process_is_reported_as_dead(folder, monkeypatch):
    lives = ProcessLocks(folder)
    lives.acquire(NAME)
    _die(lives)
    with monkeypatch.context() as patch:
        patch.setattr(process_locks, "read_boot_id", lambda: "")
        assert lives.find_dead() == []
        with pytest.raises(OSError, match="boot id"):
            lives.acquire("worker/other")
    assert lives.find_dead() == [NAME], "the failed acquire left no file"
    assert len(list(folder.iterdir())) == 1


def test_a_copy_of_the_file_of_a_live_process_does_not_prove_its_end(folder, tmp_path):
    """Such a copy exists after a state folder was copied or restored."""
    lives = ProcessLocks(folder)
    lives.acquire(NAME)
    copied = shutil.copytree(folder, tmp_path / "copy" / "workers")
    assert ProcessLocks(copied).find_dead() == []
    file = _one(folder)
    shutil.copy(file, folder / "draft")
    (folder / "draft").rename(file)
    assert ProcessLocks(folder).find_dead() == [], "another file has the name"


def test_a_renamed_file_does_not_prove_the_end_of_another_process(folder):
    lives = ProcessLocks(folder)
    lives.acquire(NAME)
    file = _one(folder)
    file.rename(file.with_name("worker%2Fanother"))
    _die(lives)
    assert lives.find_dead() == []


@pytest.mark.parametrize("much", [0, 10, -1])
def test_a_truncated_file_does_not_prove_that_its_process_has_ended(folder, much):
    lives = ProcessLocks(folder)
    lives.acquire(NAME)
    file = _one(folder)
    _die(lives)
    os.truncate(file, much if much >= 0 else file.stat().st_size + much)
    assert lives.find_dead() == []


def test_a_process_that_is_acquiring_its_lock_is_never_reported_as_dead(folder, monkeypatch):
    looks: list[list[str]] = []

    def looking(act: Callable[..., Any]) -> Callable[..., Any]:
        def first_look(*args: Any, **more: Any) -> Any:
            monkeypatch.undo()
            looks.append(ProcessLocks(folder).find_dead())
            patch()
            return act(*args, **more)

        return first_look

    def patch() -> None:
        monkeypatch.setattr(fcntl, "flock", looking(flock))
        monkeypatch.setattr(os, "write", looking(write))
        monkeypatch.setattr(os, "fstat", looking(fstat))

    flock, write, fstat = fcntl.flock, os.write, os.fstat
    patch()
    lives = ProcessLocks(folder)
    lives.acquire(NAME)
    monkeypatch.undo()
    assert len(looks) >= 4 and not any(looks)
    assert ProcessLocks(folder).find_dead() == []
    _die(lives)
    assert ProcessLocks(folder).find_dead() == [NAME]


def test_acquire_fails_on_a_file_system_without_locks(folder, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)
    with pytest.raises(OSError, match="does not keep locks"):
        ProcessLocks(folder).acquire(NAME)
    assert list(folder.iterdir()) == []


def test_acquire_fails_on_a_full_disk(folder, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, text: write(file, text[:5]))
    with pytest.raises(OSError, match="no room"):
        ProcessLocks(folder).acquire(NAME)
    assert list(folder.iterdir()) == []


def test_a_missing_state_folder_is_not_created(tmp_path):
    with pytest.raises(OSError, match="no state folder"):
        ProcessLocks(tmp_path / "var" / "workers").acquire(NAME)
    assert list(tmp_path.iterdir()) == [] and ProcessLocks(tmp_path / "var" / "workers").find_dead() == []


def test_acquire_fails_in_a_folder_of_another_user(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    if os.getuid() == 0:  # Folders of root are trusted.
        os.chown(folder, 12345, -1)
    with pytest.raises(StateFolderNotPrivate):
        ProcessLocks(folder).acquire(NAME)


def test_unlocked_files_are_deleted_after_a_day_and_locked_files_are_kept(folder):
    lives, old = ProcessLocks(folder), process_locks._KEEP_S + 60
    for name in ("held", "dead", "young"):
        lives.acquire(name)
    (folder / "half").touch()
    for name in ("dead", "young"):
        _die(lives, name)
    for name in ("held", "dead", "half"):
        found = (folder / name).stat()
        os.utime(folder / name, (found.st_mtime - old, found.st_mtime - old))
    ProcessLocks(folder).acquire("another")
    assert sorted(path.name for path in folder.iterdir()) == ["another", "held", "young"]


def test_a_private_folder_without_a_database_is_enough_for_the_proof(tmp_path: Path) -> None:
    """In production the database is PostgreSQL, and SLOTKEEPER_HOME holds nothing else."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    lives = ProcessLocks(home / "workers")
    lives.try_acquire(NAME)
    _die(lives)
    assert lives.find_dead() == [NAME]


def test_a_worker_logs_a_warning_when_other_users_can_enter_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    with capture_logs() as logged:
        ProcessLocks(home / "workers").try_acquire(NAME)
    assert [(line["event"], line["log_level"]) for line in logged] == [("end_not_provable", "warning")]
