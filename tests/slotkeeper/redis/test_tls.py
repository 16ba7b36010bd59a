"""A Redis with TLS serves as queue, broker and result backend with the URL from the README."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from app.up.ports import free_port
from slotkeeper.redis.connections import connect
from tasks.config import TaskSettings
from tests.support.certificates import self_signed
from tools.cluster.valkey_process import Valkey


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 that signs itself, with its key, in one file."""
    return self_signed(tmp_path_factory.mktemp("tls") / "redis.pem")


@pytest.fixture(scope="module")
def tls_url(certificate: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis that answers over TLS; it names no `ssl_cert_reqs`."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on PATH; the embedded Valkey may be built without TLS")
    port, file = free_port(), str(certificate)
    settings = {"tls-port": str(port), "tls-cert-file": file, "tls-key-file": file, "tls-ca-cert-file": file}
    settings["tls-auth-clients"] = "no"
    with Valkey(tmp_path_factory.mktemp("redis"), binary=binary, settings=settings):
        yield f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"


@pytest.mark.parametrize("suffix", ["", "&ssl_cert_reqs=required"])
def test_queue_broker_and_results_work_over_tls(tls_url: str, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTKEEPER_REDIS_URL", url := tls_url + suffix)
    settings = TaskSettings()
    with connect(url, 5) as client:
        assert client.ping()
    app = Celery(broker=settings.broker, backend=settings.results)
    app.conf.update(broker_connection_timeout=3)
    with app.connection_for_write() as connection, connection.SimpleQueue("over_tls") as queue:
        queue.put({"job": 1})
        assert queue.get(timeout=5).payload == {"job": 1}
    app.backend.store_result("a-task", 42, "SUCCESS")
    assert app.AsyncResult("a-task").get(timeout=5) == 42


@pytest.mark.parametrize(
    ("url", "used"),
    [
        ("rediss://h:1/0", "rediss://h:1/0?ssl_cert_reqs=required"),
        ("rediss://h:1/0?ssl_ca_certs=a", "rediss://h:1/0?ssl_ca_certs=a&ssl_cert_reqs=required"),
        ("rediss://h:1/0?ssl_cert_reqs=none", "rediss://h:1/0?ssl_cert_reqs=none"),
        ("redis://h:1/0", "redis://h:1/0"),
        ("amqps://h/", "amqps://h/"),
    ],
)
def test_celery_checks_the_certificate_unless_the_url_disables_the_check(url: str, used: str) -> None:
    settings = TaskSettings(broker_url=url, result_url=url)
    assert (settings.broker, settings.results) == (used, used)
