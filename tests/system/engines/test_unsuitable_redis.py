"""A Redis Cluster, a Sentinel, or a Redis that evicts keys: every process refuses it at start, with the remedy."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from redis import Redis, RedisError

from app.up.errors import UpError
from app.up.ports import free_port
from app.up.valkey_server import check_remote
from slotkeeper.config import exit_if_refused
from slotkeeper.redis.connections import UnsuitableRedis, connect, explain_unsuitable
from tasks import startup
from tests.support.api import clear_wiring
from tools.cluster.stack import REPO
from tools.cluster.valkey_process import NoValkey, Valkey, find_binary

REMEDIES = {
    "cluster": "give the URL of a single Redis",
    "sentinel": "give the URL of the primary",
    "evicting": "set maxmemory-policy noeviction",
}
PROCESSES = {
    "web": ("-m", "app.server"),
    "worker": ("-m", "tasks", "worker", "-Q", "celery", "-n", "w@%h", "--without-mingle", "--without-gossip"),
    "maintenance": ("-m", "tasks", "worker", "-Q", "maintenance", "-n", "m@%h", "--pool", "threads"),
    "beat": ("-m", "tasks", "beat"),
    "webhooks": ("-m", "tasks.webhooks"),
    "relay": ("-m", "tasks.relay"),
    "up": ("-m", "app.cli", "up", "--no-demo"),
}


@contextmanager
def sentinel(folder: Path, binary: str) -> Iterator[str]:
    """The URL of a Sentinel that watches nothing."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sentinel.conf").write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\n")
    command = [binary, str(folder / "sentinel.conf"), "--sentinel"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, tick = f"redis://127.0.0.1:{port}/0", threading.Event()
    try:
        for _ in range(1000):
            with suppress(RedisError), connect(url, 1) as client:
                client.ping()
                break
            tick.wait(0.01)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=["bundled", "redis-server"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URLs that look like those of any Redis, of the bundled Valkey's program and of the system's Redis."""
    folder = tmp_path_factory.mktemp("unsuited")
    try:
        binary = find_binary() if request.param == "bundled" else shutil.which("redis-server")
    except NoValkey as missing:
        pytest.skip(str(missing))
    if binary is None:
        pytest.skip("redis-server is not installed")
    cluster = Valkey(folder / "cluster", binary=binary, settings={"cluster-enabled": "yes"})
    evicting = Valkey(folder / "evicting", binary=binary, settings={"maxmemory-policy": "allkeys-lru"})
    with cluster, evicting, sentinel(folder / "sentinel", binary) as watching:
        yield {"cluster": cluster.url, "evicting": evicting.url, "sentinel": watching}


@pytest.mark.parametrize("kind", REMEDIES)
def test_an_unsuitable_redis_is_detected_by_info_and_the_remedy_is_named(servers: dict[str, str], kind: str) -> None:
    with connect(servers[kind], 5) as client:
        assert REMEDIES[kind] in (explain_unsuitable(client) or "")
    with pytest.raises(UpError, match=REMEDIES[kind]):
        check_remote(servers[kind])


def test_a_suitable_redis_that_forbids_the_config_command_is_accepted(client: Redis) -> None:
    client.acl_setuser("managed", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-config"])
    pool = client.connection_pool.connection_kwargs
    with Redis(host=pool["host"], port=pool["port"], username="managed", password="x") as managed:
        assert explain_unsuitable(managed) is None


@pytest.mark.parametrize("kind", REMEDIES)
def test_every_process_refuses_it_at_start_with_one_sentence(
    servers: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SLOTKEEPER_REDIS_URL", servers[kind])
    clear_wiring()
    try:
        with pytest.raises(SystemExit) as ended, exit_if_refused():
            startup.prepare()
    finally:
        monkeypatch.undo()
        clear_wiring()
    assert str(ended.value).startswith("Error: ") and REMEDIES[kind] in str(ended.value)


@pytest.mark.parametrize("variable", ["SLOTKEEPER_BROKER_URL", "SLOTKEEPER_RESULT_URL"])
def test_a_cluster_is_no_broker_and_no_result_backend(
    servers: dict[str, str], client: Redis, variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = client.connection_pool.connection_kwargs["port"]
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SLOTKEEPER_REDIS_URL", f"redis://127.0.0.1:{port}/0")
    monkeypatch.setenv(variable, servers["cluster"])
    clear_wiring()
    try:
        with pytest.raises(UnsuitableRedis, match=f"{variable} leads to a Redis Cluster"):
            startup.check_redis()
    finally:
        monkeypatch.undo()
        clear_wiring()


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        ("redis+cluster", "cluster"),
        ("rediscluster", "cluster"),
        ("redis+sentinel", "sentinel"),
        ("sentinel", "sentinel"),
        ("http", "not the URL of a Redis"),
    ],
)
def test_a_url_that_is_none_of_a_single_redis_is_refused_and_not_repeated(scheme: str, kind: str) -> None:
    with pytest.raises(UnsuitableRedis, match=REMEDIES.get(kind, kind)) as refused:
        connect(f"{scheme}://:hunter2@127.0.0.1:6379/0", 1)
    assert "hunter2" not in str(refused.value)


def environment(tmp_path: Path, url: str) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith("SLOTKEEPER_")}
    ports = {f"SLOTKEEPER_{name}PORT": str(free_port()) for name in ("", "FLOWER_")}
    return given | ports | {"SLOTKEEPER_HOME": str(tmp_path / "home"), "SLOTKEEPER_REDIS_URL": url}


@pytest.mark.timeout(300)  # Seven programs start at once, and the imports of each take 5 s of CPU.
def test_each_program_exits_at_once_and_prints_the_reason(tmp_path: Path) -> None:
    env = environment(tmp_path, "redis+cluster://127.0.0.1:7000/0")
    started = {
        name: subprocess.Popen(
            [sys.executable, *words], env=env, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name, words in PROCESSES.items()
    }
    try:
        ends = {name: (process.communicate(timeout=240)[0], process.returncode) for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
    for name, (output, status) in ends.items():
        assert status not in (0, None), name
        assert REMEDIES["cluster"] in output.strip().splitlines()[-1], (name, output)
        assert "Traceback" not in output, name


def test_an_unreachable_redis_is_not_refused_at_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SLOTKEEPER_REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")
    clear_wiring()
    try:
        with exit_if_refused():
            startup.prepare()
    finally:
        monkeypatch.undo()
        clear_wiring()
