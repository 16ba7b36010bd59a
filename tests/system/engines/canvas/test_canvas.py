"""The contract on this machine: pytest-celery's application and worker beside real Slotkeeper workers, over Redis."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from tests.support.cluster import Cluster
from tests.system.engines.canvas.contract import CONTRACT, add_tasks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture(scope="session")
def celery_config(cluster: Cluster) -> dict[str, Any]:
    """The application uses the broker of Slotkeeper's workers, with a separate queue."""
    assert cluster.stack.valkey is not None
    return {
        "broker_url": cluster.stack.valkey.url,
        "result_backend": cluster.stack.valkey.url,
        "task_default_queue": "theirs",
    }


@pytest.fixture(scope="session")
def celery_worker_parameters() -> dict[str, Any]:
    """It reads its own queue alone."""
    return {"queues": ("theirs",), "perform_ping_check": False}


@pytest.fixture
def theirs(celery_app: Celery) -> Celery:
    """An application that does not have our code: in this process Celery shares our tasks with each of its apps."""
    celery_app.tasks.pop("infer", None)
    add_tasks(celery_app)
    return celery_app


@pytest.mark.parametrize("composed", CONTRACT, ids=lambda composition: composition.__name__)
def test_an_application_composes_jobs_with_its_own_tasks(
    cluster: Cluster,
    theirs: Celery,
    celery_worker: Any,
    composed: Callable[[Celery, str], None],
) -> None:
    cluster.ensure_workers(1)
    composed(theirs, cluster.model(2))
