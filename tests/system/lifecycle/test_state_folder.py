"""Only the owner may read the state folder, whichever process creates it and whatever the umask is."""

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError

from app.up import valkey_server
from app.up.errors import UpError
from app.up.installation_folder import InstallationFolder, flower_password, redis_password
from app.up.launcher import _without_password
from app.up.ports import free_port
from migrations import migrate
from routing.config import RoutingSettings
from slotkeeper import state_folder as folders
from slotkeeper.config import StorageSettings
from slotkeeper.db import Database
from slotkeeper.state_folder import StateFolderNotPrivate, make_private_file, make_private_folder, read_or_create

FIRST = {
    "migrate": ["-m", "app.cli", "migrate"],
    "tenants": ["-m", "app.cli", "tenants", "list"],
    "a worker's secret": ["-c", "from tasks.security.keyring import fingerprints; fingerprints()"],
    "a database": ["-c", "from tasks.services import database; database().read().__enter__()"],
    "web": ["-c", "from app.factory import create_app; create_app()"],
    "beat": ["-c", "from tasks.extensions import signal_handlers as signals; signals._prepare()"],
    "Flower's password": [
        "-c",
        "from pathlib import Path; from app.up.installation_folder import flower_password as f; import os;"
        'f(Path(os.environ["SLOTKEEPER_HOME"]))',
    ],
}

MAKES_NOTHING = ("tenants", "a database", "web")


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0o000)
    yield
    os.umask(before)


def _modes(folder: Path) -> dict[str, int]:
    return {str(path): stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}


def _too_open(folder: Path) -> dict[str, str]:
    return {path: oct(mode) for path, mode in _modes(folder).items() if mode & 0o077}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("found", ["nothing", "an open folder"])
def test_the_first_process_creates_a_private_state_folder(tmp_path: Path, first: str, found: str) -> None:
    folder = tmp_path / "home"
    if found == "an open folder":
        folder.mkdir(0o777)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLOTKEEPER_")}
    environment = kept | {"SLOTKEEPER_HOME": str(folder), "SLOTKEEPER_REDIS_PORT": str(free_port())}
    done = subprocess.run([sys.executable, *FIRST[first]], env=environment, capture_output=True, text=True, timeout=60)
    made = {path.name for path in folder.iterdir()} if folder.exists() else set()
    assert made or first in MAKES_NOTHING, done.stderr
    assert made == set() or _too_open(folder) == {}


def test_an_open_state_folder_is_made_private(tmp_path: Path) -> None:
    """Other users then cannot read the files in the folder, whatever the files' modes are."""
    folder = tmp_path / "home"
    folder.mkdir(0o755)
    (folder / "up.lock").touch(0o666)
    with InstallationFolder(folder):
        assert not folder.stat().st_mode & 0o077


def test_a_sqlite_database_and_its_wal_files_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    migrate.upgrade(f"sqlite:///{tmp_path / 'migrated.db'}")
    database = Database(f"sqlite:///{tmp_path / 'elsewhere.db'}")
    try:
        database.write(lambda tx: tx.connection.exec_driver_sql("CREATE TABLE t (n INTEGER)"))
        names = {entry.name for entry in tmp_path.iterdir()}
        assert {"elsewhere.db", "elsewhere.db-wal", "elsewhere.db-shm"} <= names
        assert _too_open(tmp_path).keys() <= {str(tmp_path)}
    finally:
        database.close()


@pytest.mark.parametrize("mode", [0o755, 0o707, 0o1777])
def test_a_shared_folder_is_refused_with_a_sentence(tmp_path: Path, mode: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "somebody's file").touch()
    shared.chmod(mode)
    with pytest.raises(StateFolderNotPrivate, match=r"set SLOTKEEPER_HOME .*chmod 700"):
        make_private_folder(shared)
    with pytest.raises(UpError, match="chmod 700"), InstallationFolder(shared):
        pass
    assert stat.S_IMODE(shared.stat().st_mode) == mode, "what is not ours is left as it is"


def test_a_folder_of_another_user_is_refused_although_it_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_private_folder(tmp_path / "made")
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    monkeypatch.setattr(folders, "_ROOT", folder.stat().st_uid + 2)
    with pytest.raises(StateFolderNotPrivate, match="another user"):
        make_private_folder(folder)
    monkeypatch.setattr(folders, "_ROOT", folder.stat().st_uid)
    assert make_private_folder(folder) == folder


def test_a_sticky_folder_is_refused_as_the_state_folder(tmp_path: Path) -> None:
    """Example: the database of root is in /tmp.  A private /tmp would break all other users."""
    (tmp_path / "record.db").touch()
    tmp_path.chmod(0o1777)
    with pytest.raises(StateFolderNotPrivate):
        make_private_folder(tmp_path)


def test_a_folder_that_stores_no_data_keeps_its_permissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").mkdir()
    tmp_path.chmod(0o755)
    folders.restrict_state_folder(StorageSettings(home=tmp_path, database_url="postgresql://x"))
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_symlink_is_not_followed_to_change_the_mode_of_its_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()
    target.chmod(0o644)
    (tmp_path / "link").symlink_to(target)
    make_private_file(tmp_path / "link")
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_concurrent_first_readers_get_the_same_text(tmp_path: Path) -> None:
    gate, found = threading.Barrier(8), []

    def ask() -> None:
        gate.wait()
        found.append(read_or_create(tmp_path / "word", lambda: os.urandom(8).hex()))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["word"], "no temporary file is left"


# -- the embedded Valkey's password ----------------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[int, str, "subprocess.Popen[bytes]"]]:
    port, password = free_port(), redis_password(tmp_path)
    folder = make_private_folder(tmp_path / 'valkey "x"')
    role = valkey_server.valkey_role(valkey_server.find_valkey(), port, folder, 1, password)
    assert password not in role.command
    process = subprocess.Popen(["/bin/sh", "-c", f"exec {role.command}"], stdout=subprocess.DEVNULL, umask=0o077)
    try:
        for _ in range(2000):
            if valkey_server.is_ready(port, password):
                break
            process.poll()
            assert process.returncode is None
            threading.Event().wait(0.01)
        yield port, password, process
    finally:
        process.terminate()
        process.wait()


def test_the_embedded_valkey_serves_only_clients_with_the_password(
    running: tuple[int, str, "subprocess.Popen[bytes]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, password, process = running
    with Redis(port=port) as stranger, pytest.raises(AuthenticationError):
        stranger.ping()
    assert not valkey_server.is_ready(port, "guessed")
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path))
    monkeypatch.setenv("SLOTKEEPER_REDIS_PORT", str(port))
    with Redis.from_url(RoutingSettings().effective_redis_url) as ours:
        assert ours.ping()
    command = Path(f"/proc/{process.pid}/cmdline")
    assert not command.exists() or password.encode() not in command.read_bytes()
    assert _too_open(tmp_path) == {}


def test_no_password_is_added_before_the_first_start_or_with_an_external_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path))
    assert RoutingSettings().effective_redis_url == "redis://127.0.0.1:6399/0"
    redis_password(tmp_path)
    monkeypatch.setenv("SLOTKEEPER_REDIS_URL", "redis://other/1")
    assert RoutingSettings().effective_redis_url == "redis://other/1"


@pytest.mark.parametrize("url", ["redis://:hush@127.0.0.1:{port}/0", "redis://:hush@127.0.0.1:x{port}/0", "hush"])
def test_an_error_about_an_external_redis_does_not_repeat_its_password(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UpError, match="SLOTKEEPER_REDIS_URL") as refused:
        valkey_server.check_remote(url.format(port=port))
    assert "hush" not in refused.value.message


def test_an_error_about_a_broker_does_not_repeat_its_password() -> None:
    url = "amqp://me:h%40sh@host/x"
    assert _without_password(f"cannot reach {url}: me:h@sh refused, h%40sh", url) == (
        "cannot reach amqp://***@host/x: *** refused, ***"
    )


def test_flowers_password_is_the_owners_only(tmp_path: Path) -> None:
    flower_password(tmp_path / "home")
    assert _too_open(tmp_path / "home") == {}
