"""Jobs of one batch are listed, counted and canceled together, by the clients that may see them."""

import re
from functools import partialmethod
from typing import Any

import pytest

from app.api import batch_views
from routing.queries import job_list
from slotkeeper import audit
from slotkeeper.audit import AuditFilter
from slotkeeper.jobs.batches import Batches
from slotkeeper.jobs.states import State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import JobError, Quarantine, new_job_id
from slotkeeper.outbox import retention
from tests.support.api import Api
from tests.support.builders import T0, a_job, a_queued_job, a_start, an_ended_job
from tests.support.sql_plans import plans_of
from tools.cluster.direct_starts import begin_run

KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])
_JOB: dict[str, Any] = {"model": "zimg", "payload": {"prompt": "a cat"}}


def _submit(api: Api, jobs: int = 3, headers: dict[str, str] | None = None) -> Any:
    answer = api.client.post("/queue/submit-batch", json=[_JOB] * jobs, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer.json


def _listed(api: Api, query: str = "", headers: dict[str, str] | None = None) -> Any:
    return _got(api, f"/queue/batches{query}", headers)


def _got(api: Api, path: str, headers: dict[str, str] | None = None) -> Any:
    return api.client.get(path, headers=headers).json


def test_a_batch_is_shown_with_its_progress(api: Api) -> None:
    api.model()
    sent = _submit(api)
    api.submitted()
    api.client.post(f"/queue/jobs/{sent['jobs'][0]['job_id']}/cancel")
    shown = _got(api, f"/queue/batches/{sent['batch']}")
    assert (shown["jobs"], shown["ended"], shown["status"]) == (3, 1, "active")
    assert shown["by_state"] == {"queued": 2, "canceled": 1}
    assert shown["completed_at"] is None and shown["tenant"] == "default"
    listed = _got(api, f"/queue/jobs?batch={sent['batch']}")["jobs"]
    assert [job["job_id"] for job in listed] == [job["job_id"] for job in reversed(sent["jobs"])]
    assert {job["batch"] for job in listed} == {sent["batch"]}
    dead = _got(api, f"/queue/jobs?batch={sent['batch']}&status=canceled")["jobs"]
    assert [job["job_id"] for job in dead] == [sent["jobs"][0]["job_id"]]


def test_batches_are_listed_page_by_page_the_newest_first(api: Api) -> None:
    api.model()
    sent = [_submit(api, 1)["batch"] for _ in range(5)]
    first = _listed(api, "?limit=2")
    second = _listed(api, f"?limit=2&cursor={first['next_cursor']}")
    third = _listed(api, f"?limit=2&cursor={second['next_cursor']}")
    assert [batch["batch"] for page in (first, second, third) for batch in page["batches"]] == sent[::-1]
    assert third["next_cursor"] is None


def test_a_cancel_of_a_batch_cancels_all_of_its_jobs(api: Api) -> None:
    api.register()
    sent = _submit(api)
    offer = api.notifications.offers[0]
    assert begin_run(api.dispatcher, offer, "a-worker") is not None
    answer = api.client.post(f"/queue/batches/{sent['batch']}/cancel")
    assert answer.json == {"batch": sent["batch"], "canceled": 2, "canceling": 1, "remaining": 0}
    assert _got(api, f"/queue/batches/{sent['batch']}")["by_state"] == {"running": 1, "canceled": 2}


def test_a_batch_that_takes_longer_than_one_request_is_canceled_by_the_next(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.model()
    sent = _submit(api)
    one_job = partialmethod(JobStore.cancel_page_of_batch, limit=1)
    monkeypatch.setattr(JobStore, "cancel_page_of_batch", one_job)
    monkeypatch.setattr(batch_views, "_CONTROL_TIME_S", 0.0)
    answers = [api.client.post(f"/queue/batches/{sent['batch']}/cancel") for _ in range(4)]
    assert [(answer.status_code, answer.json.get("remaining")) for answer in answers] == [
        (202, 2),
        (202, 1),
        (202, 0),
        (409, None),
    ]


def test_a_waiting_job_of_a_canceled_batch_is_in_no_queue_and_its_end_is_notified(api: Api) -> None:
    api.register()
    sent = _submit(api)
    api.client.post(f"/queue/batches/{sent['batch']}/cancel")
    assert [end.job.id for end in api.notifications.ends] == [job["job_id"] for job in sent["jobs"]]
    assert api.dispatcher.queues.offer_all("zimg") == []
    entries = audit.find_entries(api.database, AuditFilter(act="batch.cancel"))
    assert [entry.data["batch"] for entry in entries] == [sent["batch"]]


def test_a_batch_that_has_ended_is_not_canceled(api: Api) -> None:
    api.model()
    sent = _submit(api)
    assert api.client.post(f"/queue/batches/{sent['batch']}/cancel").status_code == 200
    assert api.client.post(f"/queue/batches/{sent['batch']}/cancel").status_code == 409
    shown = _got(api, f"/queue/batches/{sent['batch']}")
    assert shown["status"] == "ended" and shown["completed_at"] is not None


def test_a_batch_sent_again_is_the_batch_that_it_was(api: Api) -> None:
    api.model()
    first, again = (_submit(api, 2, {"Idempotency-Key": "b-1"}) for _ in range(2))
    assert (again["accepted"], again["batch"]) == (0, first["batch"])
    assert len(_listed(api)["batches"]) == 1


@KEYED
def test_a_tenant_sees_only_its_own_batches(api: Api, settings: dict[str, str]) -> None:
    acme, other, root = api.tenant("acme"), api.tenant("other"), api.tenant("root", admin=True)
    assert api.client.put("/admin/model-configs/zimg", json={}, headers=root).status_code == 200
    own, foreign = (_submit(api, headers=who)["batch"] for who in (acme, other))
    assert [batch["batch"] for batch in _listed(api, headers=acme)["batches"]] == [own]
    assert [batch["batch"] for batch in _listed(api, headers=root)["batches"]] == [foreign, own]
    assert api.client.get(f"/queue/batches/{foreign}", headers=acme).status_code == 404
    assert api.client.post(f"/queue/batches/{foreign}/cancel", headers=acme).status_code == 404
    assert _got(api, f"/queue/jobs?batch={foreign}", acme)["jobs"] == []
    assert _got(api, f"/queue/batches/{foreign}", root)["by_state"] == {"queued": 3}


def test_requests_that_name_the_same_batch_submit_one_batch(api: Api) -> None:
    api.model()
    name = new_job_id()
    for jobs in (2, 3):
        answer = api.client.post(f"/queue/submit-batch?batch={name}", json=[_JOB] * jobs)
        assert (answer.status_code, answer.json["batch"]) == (202, name)
    assert [(batch["batch"], batch["jobs"]) for batch in _listed(api)["batches"]] == [(name, 5)]
    refused = api.client.post("/queue/submit-batch?batch=x", json=[_JOB])
    assert refused.status_code == 422


@KEYED
def test_batches_of_two_tenants_with_the_same_name_are_separate(api: Api, settings: dict[str, str]) -> None:
    acme, other, root = api.tenant("acme"), api.tenant("other"), api.tenant("root", admin=True)
    assert api.client.put("/admin/model-configs/zimg", json={}, headers=root).status_code == 200
    name = new_job_id()
    for who, jobs in ((acme, 2), (other, 3)):
        assert api.client.post(f"/queue/submit-batch?batch={name}", json=[_JOB] * jobs, headers=who).status_code == 202
    for who, jobs in ((acme, [2]), (other, [3]), (root, [3, 2])):
        assert [batch["jobs"] for batch in _listed(api, headers=who)["batches"]] == jobs
        assert _got(api, f"/queue/batches/{name}", who)["jobs"] == jobs[-1]
    assert api.client.post(f"/queue/batches/{name}/cancel", headers=other).json["canceled"] == 3
    assert _got(api, f"/queue/batches/{name}", acme)["by_state"] == {"queued": 2}


@pytest.mark.parametrize(
    "path", ["/queue/batches?cursor=x", "/queue/jobs?batch=x", "/queue/jobs?batch=%00", "/queue/batches/%00"]
)
def test_an_invalid_cursor_or_batch_name_is_refused(api: Api, path: str) -> None:
    assert api.client.get(path).status_code == 422


def test_a_batch_that_there_is_not_is_not_found(api: Api) -> None:
    for batch in (new_job_id(), "x"):
        assert api.client.get(f"/queue/batches/{batch}").status_code == 404


# -- on both databases -----------------------------------------------------------------------------------------


def _batch_of(store: JobStore, jobs: int, tenant: str = "acme") -> str:
    name = new_job_id()
    store.submit([a_job(batch=name, tenant=tenant) for _ in range(jobs)], T0)
    return name


def test_a_batch_is_known_by_its_jobs_and_gone_with_the_last(store: JobStore) -> None:
    name = new_job_id()
    dead = an_ended_job(store, State.DEAD, batch=name)
    batches = Batches(store.database)
    (shown,) = map(batches.read_progress, batches.list_newest(None, None, 10))
    assert (shown.batch.id, shown.by_state, shown.completed_ms) == (name, {State.DEAD: 1}, T0)
    assert retention.delete_dead_job(store.database, dead.id)
    assert batches.read_progress(shown.batch).is_gone
    assert batches.delete_old(T0) == 0
    assert batches.delete_old(T0 + 1) == 1
    assert batches.list_newest(None, None, 10) == []


def test_a_single_job_belongs_to_no_batch(store: JobStore) -> None:
    name = _batch_of(store, 2)
    a_start(store, a_queued_job(store).id)
    batches = Batches(store.database)
    (shown,) = map(batches.read_progress, batches.list_newest(None, None, 10))
    assert (shown.batch.id, shown.by_state, shown.completed_ms) == (name, {State.QUEUED: 2}, None)
    assert batches.delete_old(T0 + 1) == 0


def test_looks_at_batches_read_by_their_indexes(store: JobStore) -> None:
    """Among jobs that came alone; each statement's plan names the index, and none reads the whole table."""
    for _ in range(40):
        _batch_of(store, 5)
    name = _batch_of(store, 5)
    for _ in range(8):
        store.submit([a_job() for _ in range(500)], T0)
    store.database.write(lambda tx: tx.connection.exec_driver_sql("ANALYZE"))
    batches = Batches(store.database)
    with plans_of(store) as plans:
        (shown,) = batches.list_newest("acme", None, 1)
        batches.read_progress(shown)
        store.cancel_page_of_batch(name, "acme", T0, JobError("canceled", "x"), Quarantine("canceled", T0))
        job_list.find_jobs(store.database, batch=name, tenant="acme", limit=50)
        store.hold_page_of_batch(name, "acme", T0)
        batches.release(shown, batches.list_held(shown, 500), T0)
        batches.end(shown, T0)
    keys = re.compile("ix_jobs_tenant_batch|PRIMARY KEY|pk_jobs")
    listed = plans.pop(4)
    assert "ix_jobs_batch_seq" in listed, listed
    for plan in plans:
        assert keys.search(plan), plan
        assert "SCAN jobs\n" not in plan and "Seq Scan on jobs" not in plan, plan
