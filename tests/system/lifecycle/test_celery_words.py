"""Worker, maintenance and beat started with Celery's own command: `celery -A tasks …`."""

import sys
from pathlib import Path

import pytest

from tests.support.http_api import HttpApi
from tools.cluster.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

_CELERY = [sys.executable, "-P", "-m", "celery", "-A", "tasks"]


def test_a_job_that_is_retried_runs_with_processes_that_celerys_own_command_starts(tmp_path: Path) -> None:
    """The retry needs beat, whose messages have maintenance queue the delayed job again."""
    with Stack(tmp_path) as stack:
        stack.start("worker", [*_CELERY, "worker", "-Q", "celery", "-n", "worker@%h", "-l", "info"])
        stack.start("maintenance", [*_CELERY, "worker", "-Q", "maintenance", "-n", "maintenance@%h", "-l", "info"])
        stack.start("beat", [*_CELERY, "beat", "-l", "info"])
        stack.web()
        api = HttpApi(stack)
        api.register("zimg", stack.server("gpu1", 1), max_retries=1, retry_backoff=0.1, retry_backoff_max=0.1)
        job_id = api.submit("zimg", {"prompt": "a cat", "fail": "error", "fail_attempts": 1, "seconds": 0.01})
        job = api.ended(job_id)
        assert (job["status"], job["attempts"]) == ("completed", 2)
