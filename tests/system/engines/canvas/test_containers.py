"""The contract on the brokers of pytest-celery's matrix, in containers; our processes run on this machine."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker

from tests.support.cluster import started_cluster
from tests.system.engines.canvas.contract import CONTRACT, add_tasks


def _docker_answers() -> bool:
    try:
        return subprocess.run(["docker", "version"], capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


if not _docker_answers():
    pytest.skip("Docker does not answer here, which pytest-celery's broker matrix needs", allow_module_level=True)

# Their plugins are not loaded, as they take two seconds of each process of the tests (setup.cfg).
from pytest_celery import *  # noqa: E402, F403
from pytest_celery import CELERY_RABBITMQ_BROKER, CELERY_REDIS_BACKEND, CELERY_REDIS_BROKER, CeleryTestSetup  # noqa: E402
from pytest_docker_tools.plugin import *  # noqa: E402, F403

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(params=[CELERY_REDIS_BROKER, CELERY_RABBITMQ_BROKER])
def celery_broker(request: pytest.FixtureRequest) -> Any:
    broker = request.getfixturevalue(request.param)
    yield broker
    broker.teardown()


@pytest.fixture(params=[CELERY_REDIS_BACKEND])
def celery_backend(request: pytest.FixtureRequest) -> Any:
    backend = request.getfixturevalue(request.param)
    yield backend
    backend.teardown()


@pytest.fixture
def celery_worker_cluster() -> None:
    """Start no worker in a container: Slotkeeper's workers are processes of this machine."""


@pytest.fixture
def celery_worker_cluster_config(celery_broker_cluster_config: Any, celery_backend_cluster_config: Any) -> Any:
    return {
        "celery_broker_cluster_config": celery_broker_cluster_config,
        "celery_backend_cluster_config": celery_backend_cluster_config,
    }


@pytest.mark.parametrize("composed", CONTRACT, ids=lambda composition: composition.__name__)
def test_an_application_composes_jobs_with_its_own_tasks(
    celery_setup: CeleryTestSetup, tmp_path: Path, composed: Callable[[Celery, str], None]
) -> None:
    app = celery_setup.app
    app.conf.task_default_queue = "theirs"
    add_tasks(app)
    env = {"SLOTKEEPER_BROKER_URL": app.conf.broker_url, "SLOTKEEPER_RESULT_URL": app.conf.result_backend}
    with (
        started_cluster(tmp_path, **env) as cluster,
        start_worker(app, queues=("theirs",), perform_ping_check=False),
    ):
        cluster.ensure_workers(1)
        composed(app, cluster.model(2))
