"""A model from whose configuration no request can be built: the API refuses it. If an older release has stored it,
only that model fails."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.dispatch.run_steps import RunSteps
from routing.queue.queues import Offer
from slotkeeper.clock import now_ms
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import Model
from tasks import health_checks, maintenance, server_push
from tasks.server_adapters import Misconfigured, adapter_for
from tasks.services import catalog, progress_scripts, workers
from tasks.worker.concurrency import TakenOffer
from tasks.worker.worker import Worker
from tasks.worker.worker_run import RetryingIo, WorkerRun
from tests.support.api import Api

TEMPLATES = [
    "/a#{id}",
    "/../{id}",
    "/{id}/..",
    "/%2e%2e/{id}",
    "//evil.example/{id}",
    "/{id}/{id}",
    "/{id}/{other}",
    "/{{id}}",
    "/{id}}",
    "/a\\{id}",
    "/a\r\nHost: evil/{id}",
    "/\x00{id}",
    "/%0d%0a{id}",
    "/%" + "25" * 10 + "41/{id}",
]
ID_FIELDS = ["/a~2", "/" + "a/" * 45 + "~"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_cannot_be_compiled_is_refused_with_its_field(api: Api, template: str) -> None:
    answer = api.client.put("/admin/model-configs/zimg", json={"poll_endpoint_template": template})
    assert (answer.status_code, answer.json["field"]) == (422, "poll_endpoint_template")
    assert api.client.get("/admin/model-configs/zimg").status_code == 404, "nothing was stored"


@pytest.mark.parametrize("id_field", ID_FIELDS)
def test_an_id_field_that_cannot_be_compiled_is_refused_with_its_field(api: Api, id_field: str) -> None:
    answer = api.client.put("/admin/model-configs/zimg", json={"id_field": id_field})
    assert (answer.status_code, answer.json["field"]) == (422, "id_field")


@pytest.mark.parametrize("template", ["/v1/jobs/{id}/status?verbose=1", "/{id}", "/jobs/{id};x=1"])
def test_a_template_that_passes_can_be_used(api: Api, template: str) -> None:
    changes: dict[str, Any] = {"poll_endpoint_template": template, "id_field": "/data/id", "model_type": "async"}
    assert api.client.put("/admin/model-configs/zimg", json=changes).status_code == 200
    model = api.dispatcher.catalog.refresh().models["zimg"]
    adapter_for("http://127.0.0.1:9/generate", model, model.described_by)


@pytest.fixture
def stored(api: Api) -> Api:
    """Register a model `broken` and a valid model, each on a separate server."""
    api.register("broken", "gpu0")
    api.register("zimg", "gpu1")
    catalog().configure("broken", {"poll_endpoint_template": "/a#{id}"}, now_ms())
    api.dispatcher.catalog.refresh()
    return api


@pytest.mark.parametrize("task", ["check_servers", "sync_locks", "check_invariants"])
def test_a_misconfigured_model_does_not_stop_the_maintenance_of_other_models(
    stored: Api, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setattr(maintenance, "_RECHECK_DELAY_S", 0)
    with capture_logs() as lines:
        getattr(maintenance, task)()
        reports = health_checks.read_reports(stored.dispatcher.catalog.get().servers.values())
    assert not reports["gpu1"].up, "no server answers there, and the check ran"
    assert "gpu0" in {line.get("server") for line in lines}


def _offer(active: ActiveRun) -> Offer:
    lease, run = active.lease, active.run
    return Offer(lease.fleet, lease.job_id, lease.name, lease.slot, lease.server, run.job.model, 0)


def test_a_job_of_a_misconfigured_model_ends_in_a_retry_that_names_the_field(stored: Api) -> None:
    task = stored.started(model="broken")
    worker = Worker(stored.dispatcher, workers(), progress_scripts(), max_runs=1)
    worker.heartbeat.end()
    watch = worker.heartbeat.add(task.lease)
    io = RetryingIo(worker.worker_loop, watch)
    run = WorkerRun(task, watch, TakenOffer(_offer(task)), _offer(task), io, RunSteps(stored.dispatcher, io))
    call = worker.server_calls.call(run)
    outcome = asyncio.run_coroutine_threadsafe(call, worker.worker_loop.loop).result(30)
    worker.close()
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "misconfigured")
    assert "poll_endpoint_template" in outcome.message


def test_a_push_for_a_job_of_a_misconfigured_model_is_left_to_the_worker(stored: Api) -> None:
    task = stored.started(model="broken")
    token = server_push.push_token(task.run.job.id, task.run.attempt)
    header = {"Authorization": f"Bearer {token}"}
    answer = stored.client.post(f"/tasks/callback/{task.run.job.id}", json={"status": "success"}, headers=header)
    assert (answer.status_code, server_push.read_push(stored.job(task.run.job.id), b"{}")) == (202, None)


def test_an_endpoint_that_is_none_is_the_fault_of_its_registration() -> None:
    with pytest.raises(Misconfigured):
        adapter_for("ftp://example/x", Model("zimg", "zimg", {}, ModelConfig()), None)
