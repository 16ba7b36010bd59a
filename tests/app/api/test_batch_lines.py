"""A batch of lines over REST: sent in chunks, each line once; errors by line; on hold, released, canceled, ended."""

import json
from typing import Any

import pytest

from routing.dispatch import batch_control
from routing.maintenance import deadlines
from slotkeeper.clock import now_ms
from slotkeeper.errors import NotFound
from slotkeeper.jobs.batch_ids import line_job_id, line_of, new_batch_id
from slotkeeper.jobs.batches import Batch, Batches, require
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.values import JobError, new_job_id
from tests.support.api import Api, TimedApi
from tests.support.batch_lines import CAT, close, create, results, send, sent, shown
from tests.support.ends import end_run_with
from tools.cluster.direct_starts import begin_run

KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])


def drive(api: Api) -> None:
    batch_control.drive_all(api.dispatcher, Batches(api.database), 86_400, 10)


def promote(api: Api) -> None:
    deadlines.promote_due_jobs(api.dispatcher, 10)


def complete(api: Api, result: str) -> str:
    """Run the job that was offered first, and return its id."""
    task = begin_run(api.dispatcher, api.notifications.offers.pop(0), "a-worker")
    assert task is not None
    end_run_with(api.dispatcher, task, Reason.FINISHED, result=result)
    return task.run.job.id


def batch_of(api: Api, batch: str) -> Batch:
    found = Batches(api.database).find(batch, None)
    assert found is not None
    return found


# -- ids ---------------------------------------------------------------------------------------------------------


def test_the_jobs_of_lines_have_ids_in_the_order_of_lines() -> None:
    batch = new_batch_id()
    ids = [line_job_id(batch, line) for line in (0, 1, 499, 99_999)]
    assert ids == sorted(ids) and len({*ids, batch}) == 5
    assert [line_of(job_id) for job_id in ids] == [0, 1, 499, 99_999]
    assert batch[14] == "7" and {job_id[14] for job_id in ids} == {"8"}
    assert new_batch_id() != batch


# -- lines -------------------------------------------------------------------------------------------------------


def test_lines_become_jobs_with_what_they_inherit(api: Api) -> None:
    api.model()
    batch = create(api, name="night run", priority=3, labels={"team": "search", "run": "1"})
    own = CAT | {"priority": 7, "labels": {"run": "2"}, "custom_id": "line-b"}
    assert sent(api, batch, [CAT, own]) == {"next_line": 2, "accepted": 2, "refused": 0, "known": 0}
    first, second = (api.client.get(f"/queue/jobs/{line_job_id(batch, line)}").json for line in (0, 1))
    assert (first["priority"], first["labels"]) == (3, {"team": "search", "run": "1"})
    assert (second["priority"], second["labels"]) == (7, {"team": "search", "run": "2"})
    assert {job["batch"] for job in (first, second)} == {batch}
    view = shown(api, batch)
    assert (view["name"], view["status"], view["next_line"], view["by_state"]) == (
        "night run",
        "open",
        2,
        {"queued": 2},
    )


def test_lines_that_were_received_are_passed_over(api: Api) -> None:
    api.model()
    batch = create(api)
    sent(api, batch, [CAT] * 3)
    assert sent(api, batch, [CAT] * 3) == {"next_line": 3, "accepted": 0, "refused": 0, "known": 3}
    assert sent(api, batch, [CAT] * 4, first=1) == {"next_line": 5, "accepted": 2, "refused": 0, "known": 2}
    gap = send(api, batch, [CAT], first=9)
    assert (gap.status_code, gap.json["code"], gap.json["next_line"]) == (409, "lines_missing", 5)
    assert shown(api, batch)["jobs"] == 5


def test_a_line_that_cannot_be_accepted_is_kept_as_an_error_and_the_others_run(api: Api) -> None:
    api.model()
    batch = create(api)
    bad = [
        b"{not json",
        b"[1]",
        {"custom_id": "no-payload"},
        CAT | {"priority": 99},
        CAT | {"cancel_when_gone": 60},
        CAT | {"modle": "x"},
        CAT | {"model": "other"},
    ]
    receipt = sent(api, batch, [CAT, *bad, CAT])
    assert receipt == {"next_line": 9, "accepted": 2, "refused": 7, "known": 0}
    listed = api.client.get(f"/batches/{batch}/errors").json["errors"]
    assert [error["line"] for error in listed] == list(range(1, 8))
    assert [error["field"] for error in listed] == [
        *("line", "line", "payload", "priority", "cancel_when_gone", "modle", "model")
    ]
    assert listed[2]["custom_id"] == "no-payload"
    page = api.client.get(f"/batches/{batch}/errors?from=3&limit=2").json
    assert [error["line"] for error in page["errors"]] == [3, 4] and page["next_line"] == 5
    assert [line["status"] for line in results(api, batch)] == ["queued", *["refused"] * 7, "queued"]


def test_lines_that_can_never_be_admitted_are_refused_one_by_one(api: Api) -> None:
    api.model(unmatched="refuse")
    batch = create(api)
    never = CAT | {"constraints": {"gpu": "none"}}
    receipt = sent(api, batch, [never, CAT, never, never, CAT])
    assert (receipt["accepted"], receipt["refused"]) == (2, 3)
    assert [error["line"] for error in api.client.get(f"/batches/{batch}/errors").json["errors"]] == [0, 2, 3]


@KEYED
def test_a_chunk_over_the_rate_limit_is_accepted_up_to_the_limit(api: Api, settings: dict[str, str]) -> None:
    acme, root = api.tenant("acme"), api.tenant("root", admin=True)
    assert api.client.put("/admin/model-configs/zimg", json={}, headers=root).status_code == 200
    limits = {"limits": {"rate_per_s": 1, "burst": 5}}
    assert api.client.patch("/admin/tenants/acme", json=limits, headers=root).status_code == 200
    batch = create(api, acme)
    answer = send(api, batch, [CAT] * 12, headers=acme)
    assert (answer.status_code, answer.json["next_line"], answer.json["accepted"]) == (200, 3, 3)
    refused = send(api, batch, [CAT] * 9, 3, headers=acme)
    assert refused.status_code == 429 and refused.headers["Retry-After"]
    assert api.client.get(f"/batches/{batch}", headers=acme).json["next_line"] == 3


def test_a_chunk_that_is_not_ndjson_or_is_too_long_or_names_no_batch_is_refused(api: Api) -> None:
    api.model()
    batch = create(api)
    assert api.client.post(f"/batches/{batch}/lines", json=[CAT]).status_code == 415
    assert send(api, batch, [CAT] * 1001).status_code == 422
    assert send(api, new_job_id(), [CAT]).status_code == 404


# -- the head ----------------------------------------------------------------------------------------------------


def test_the_same_key_is_the_same_batch_and_another_head_is_refused(api: Api) -> None:
    api.model()
    key = {"Idempotency-Key": "b-1"}
    batch = create(api, key)
    sent(api, batch, [CAT])
    again = api.client.post("/batches", json={"model": "zimg"}, headers=key)
    assert (again.status_code, again.json["batch"], again.json["next_line"]) == (200, batch, 1)
    other = api.client.post("/batches", json={"model": "zimg", "priority": 1}, headers=key)
    assert (other.status_code, other.json["code"]) == (409, "idempotency_conflict")


@pytest.mark.parametrize(
    ("head", "field"),
    [
        ({"model": "other"}, "model"),
        ({"window": "1y"}, "window"),
        ({"window": "15d"}, "window"),
        ({"on_error": "stop"}, "on_error"),
        ({"callback_url": "http://10.0.0.1/"}, "callback_url"),
        ({"priority": 10}, "priority"),
        ({"labels": {"a b": "c"}}, "labels"),
        ({"nmae": "x"}, "nmae"),
    ],
    ids=str,
)
def test_a_head_that_no_line_could_have_is_refused(api: Api, head: dict[str, Any], field: str) -> None:
    api.model()
    answer = api.client.post("/batches", json={"model": "zimg"} | head)
    assert (answer.status_code, answer.json["field"]) == (422, field)


def test_a_window_is_the_deadline_of_lines_and_the_least_priority(api: Api) -> None:
    api.model()
    batch = create(api, window="1h")
    sent(api, batch, [CAT, CAT | {"ttl": 60}, CAT | {"ttl": 7200, "priority": 2}])
    jobs = [api.client.get(f"/queue/jobs/{line_job_id(batch, line)}").json for line in range(3)]
    assert [job["priority"] for job in jobs] == [9, 9, 2]
    assert jobs[0]["deadline"] == jobs[2]["deadline"] == shown(api, batch)["deadline"]
    assert jobs[1]["deadline"] < jobs[0]["deadline"]


def test_batches_that_have_not_ended_and_their_lines_are_bounded(api: Api) -> None:
    api.model()
    limits = {"max_open_batches": 2, "max_batch_lines": 3}
    assert api.client.patch("/admin/limits", json=limits).status_code == 200
    for _ in range(2):
        batch = create(api)
    assert api.client.post("/batches", json={}).status_code == 429
    close(api, batch, 0)
    batch = create(api)
    refused = send(api, batch, [CAT] * 4)
    assert (refused.status_code, refused.json["field"]) == (422, "lines")


@KEYED
def test_a_batch_of_another_tenant_does_not_exist(api: Api, settings: dict[str, str]) -> None:
    acme, other, root = api.tenant("acme"), api.tenant("other"), api.tenant("root", admin=True)
    assert api.client.put("/admin/model-configs/zimg", json={}, headers=root).status_code == 200
    batch = create(api, acme)
    assert send(api, batch, [CAT], headers=other).status_code == 404
    for path in ("", "/errors", "/results"):
        assert api.client.get(f"/batches/{batch}{path}", headers=other).status_code == 404
    for word in ("pause", "resume", "cancel"):
        assert api.client.post(f"/batches/{batch}/{word}", headers=other).status_code == 404
    assert api.client.post(f"/batches/{batch}/close", json={"lines": 0}, headers=other).status_code == 404
    assert send(api, batch, [CAT], headers=root).status_code == 200


def test_jobs_are_not_submitted_under_the_name_of_a_batch_of_lines(api: Api) -> None:
    api.model()
    batch = create(api)
    answer = api.client.post(f"/queue/submit-batch?batch={batch}", json=[CAT | {"model": "zimg"}])
    assert answer.status_code == 409
    assert shown(api, batch)["jobs"] == 0


# -- close, end --------------------------------------------------------------------------------------------------


def test_a_batch_is_closed_with_the_number_of_its_lines(api: Api) -> None:
    api.model()
    batch = create(api)
    sent(api, batch, [CAT] * 2)
    missing, fewer = close(api, batch, 3), close(api, batch, 1)
    assert (missing.status_code, missing.json["code"], missing.json["next_line"]) == (409, "lines_missing", 2)
    assert fewer.status_code == 409
    assert [close(api, batch, 2).json["status"] for _ in range(2)] == ["active", "active"]
    refused = send(api, batch, [CAT], 2)
    assert (refused.status_code, refused.json["next_line"]) == (409, 2)
    assert sent(api, batch, [CAT] * 2)["known"] == 2


def test_a_batch_ends_once_when_its_last_job_has(api: Api) -> None:
    api.model()
    batch = create(api, callback_url="https://example.com/hook")
    sent(api, batch, [CAT] * 2)
    close(api, batch, 2)
    jobs = [line_job_id(batch, line) for line in range(2)]
    api.client.post(f"/queue/jobs/{jobs[0]}/cancel")
    drive(api)
    assert shown(api, batch)["status"] == "active"
    api.client.post(f"/queue/jobs/{jobs[1]}/cancel")
    for _ in range(2):
        drive(api)
    view = shown(api, batch)
    assert (view["status"], view["by_state"], view["completed_at"] is not None) == ("ended", {"canceled": 2}, True)
    with api.database.read() as connection:
        events = connection.exec_driver_sql("SELECT tenant, data FROM events WHERE type = 'batch.ended'").all()
        messages = connection.exec_driver_sql("SELECT receiver, job_id, type FROM messages").all()
    assert [(tenant, json.loads(data)) for tenant, data in events] == [
        ("default", {"lines": 2, "refused": 0, "by_state": {"canceled": 2}})
    ]
    assert [tuple(message) for message in messages] == [(batch, batch, "batch.ended")]


def test_an_open_batch_without_new_lines_is_closed_after_a_timeout(api: Api) -> None:
    api.model()
    batch = create(api)
    sent(api, batch, [CAT])
    batch_control.drive_all(api.dispatcher, Batches(api.database), 3600, 10)
    assert shown(api, batch)["status"] == "open"
    api.client.post(f"/queue/jobs/{line_job_id(batch, 0)}/cancel")
    batch_control.drive_all(api.dispatcher, Batches(api.database), 1e-9, 10)
    assert shown(api, batch)["status"] == "ended"


# -- on hold -----------------------------------------------------------------------------------------------------


def test_no_job_of_an_all_or_none_batch_starts_before_the_batch_is_closed(api: Api) -> None:
    api.register()
    batch = create(api, on_error="refuse")
    sent(api, batch, [CAT] * 2)
    drive(api)
    assert shown(api, batch)["by_state"] == {"delayed": 2} and api.notifications.offers == []
    explained = api.client.get(f"/queue/jobs/{line_job_id(batch, 0)}/explain").json
    assert explained["waits_for"][0]["code"] == "held"
    assert close(api, batch, 2).status_code == 200
    promote(api)
    assert shown(api, batch)["by_state"] == {"queued": 2} and len(api.notifications.offers) == 1


def test_one_invalid_line_of_an_all_or_none_batch_cancels_the_whole_batch(api: Api) -> None:
    api.register()
    batch = create(api, on_error="refuse")
    sent(api, batch, [CAT, CAT | {"not_before": 60}])
    view = close(api, batch, 2).json
    assert (view["status"], view["by_state"], view["refused"]) == ("ended", {"canceled": 1}, 1)
    assert api.notifications.offers == []
    assert api.client.get(f"/batches/{batch}/errors").json["errors"][0]["field"] == "not_before"


def test_a_paused_batch_starts_nothing_until_it_is_resumed(api: Api) -> None:
    api.model()
    batch = create(api)
    sent(api, batch, [CAT] * 2)
    paused = api.client.post(f"/batches/{batch}/pause").json
    assert (paused["paused"], paused["by_state"]) == (True, {"delayed": 2})
    sent(api, batch, [CAT], 2)
    close(api, batch, 3)
    drive(api)
    assert shown(api, batch)["by_state"] == {"delayed": 3}
    resumed = api.client.post(f"/batches/{batch}/resume").json
    assert resumed["paused"] is False
    promote(api)
    assert shown(api, batch)["by_state"] == {"queued": 3}
    assert not batch_of(api, batch).has_held


def test_maintenance_holds_a_job_that_became_due_in_a_paused_batch(timed_api: TimedApi) -> None:
    api = timed_api
    api.set_clock(now_ms())
    api.model()
    batch = create(api)
    sent(api, batch, [CAT | {"not_before": 60}])
    api.client.post(f"/batches/{batch}/pause")
    api.later(61_000)
    promote(api)
    assert shown(api, batch)["by_state"] == {"queued": 1}
    drive(api)
    assert shown(api, batch)["by_state"] == {"delayed": 1}


def test_a_canceled_batch_takes_no_more_lines_and_maintenance_cancels_the_rest(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.model()
    monkeypatch.setattr("app.api.batch_views._CONTROL_TIME_S", 0.0)
    batch = create(api)
    sent(api, batch, [CAT] * 501)
    answer = api.client.post(f"/batches/{batch}/cancel")
    assert (answer.status_code, answer.json["canceled"], answer.json["remaining"]) == (202, 500, 1)
    refused = send(api, batch, [CAT], 501)
    assert refused.status_code == 409 and "was canceled" in refused.json["detail"]
    drive(api)
    assert (shown(api, batch)["status"], shown(api, batch)["by_state"]) == ("ended", {"canceled": 501})
    assert api.client.post(f"/batches/{batch}/cancel").status_code == 409
    assert api.client.post(f"/batches/{batch}/pause").status_code == 409


def test_only_a_batch_of_lines_can_be_paused_and_has_results(api: Api) -> None:
    api.model()
    name = new_job_id()
    api.client.post(f"/queue/submit-batch?batch={name}", json=[CAT | {"model": "zimg"}])
    assert api.client.post(f"/batches/{name}/pause").status_code == 409
    assert api.client.get(f"/batches/{name}/results").status_code == 409


def test_an_open_all_or_none_batch_without_new_lines_is_canceled_after_a_timeout(api: Api) -> None:
    api.model()
    batch = create(api, on_error="refuse")
    sent(api, batch, [CAT])
    batch_control.drive_all(api.dispatcher, Batches(api.database), 1e-9, 10)
    assert (shown(api, batch)["status"], shown(api, batch)["by_state"]) == ("ended", {"canceled": 1})


def test_jobs_that_were_released_are_held_again_when_the_batch_is_paused(api: Api) -> None:
    api.model()
    batch = create(api)
    api.client.post(f"/batches/{batch}/pause")
    sent(api, batch, [CAT])
    batches = Batches(api.database)
    paused = batch_of(api, batch)
    assert not batches.release(paused, batches.list_held(paused, 10), now_ms()), "it is paused"
    batches.set_paused(paused, False, lambda tx, **about: None)
    assert batches.release(paused, batches.list_held(paused, 10), now_ms())
    api.client.post(f"/batches/{batch}/pause")
    promote(api)
    assert shown(api, batch)["by_state"] == {"delayed": 1}
    api.client.post(f"/batches/{batch}/resume")
    assert shown(api, batch)["by_state"] == {"queued": 1}


def test_a_stale_release_does_not_clear_the_flag_of_held_lines(api: Api) -> None:
    """The release read the batch before its lines were held, and found no held line."""
    api.model()
    batch = create(api)
    sent(api, batch, [CAT])
    close(api, batch, 1)
    before = batch_of(api, batch)
    api.client.post(f"/batches/{batch}/pause")
    batches = Batches(api.database)
    batches.set_paused(before, False, lambda tx, **about: None)
    assert batches.release(before, [], now_ms())
    assert batch_of(api, batch).has_held
    drive(api)
    assert shown(api, batch)["by_state"] == {"queued": 1}


def test_a_revived_job_of_an_ended_batch_runs_although_the_batch_was_paused(api: Api) -> None:
    api.register()
    assert api.client.put("/admin/model-configs/zimg", json={"max_retries": 0}).status_code == 200
    batch = create(api)
    sent(api, batch, [CAT])
    task = begin_run(api.dispatcher, api.notifications.offers.pop(0), "a-worker")
    assert task is not None
    api.client.post(f"/batches/{batch}/pause")
    close(api, batch, 1)
    error = JobError("model_error", "out of memory")
    end_run_with(api.dispatcher, task, Reason.RETRIES_EXHAUSTED, error=error)
    drive(api)
    assert shown(api, batch)["status"] == "ended"
    job = line_job_id(batch, 0)
    assert api.client.post(f"/admin/dlq/{job}/retry").status_code == 200
    close(api, batch, 1)
    drive(api)
    assert api.job(job).state == "queued" and shown(api, batch)["status"] == "active"
    answer = api.client.post(f"/batches/{batch}/cancel")
    assert (answer.status_code, answer.json["canceled"]) == (200, 1)


def test_held_lines_enter_their_queue_only_as_far_as_it_may_hold_them(api: Api) -> None:
    api.model(max_waiting=3)
    batch = create(api, on_error="refuse")
    sent(api, batch, [CAT] * 5)
    close(api, batch, 5)
    assert shown(api, batch)["by_state"] == {"queued": 3, "delayed": 2}
    for line in range(2):
        api.client.post(f"/queue/jobs/{line_job_id(batch, line)}/cancel")
    drive(api)
    assert shown(api, batch)["by_state"] == {"queued": 3, "canceled": 2}


def test_a_line_of_a_model_that_takes_no_jobs_is_an_error(api: Api) -> None:
    api.model()
    api.model("flux")
    batch = create(api)
    assert api.client.patch("/admin/models/flux", json={"state": "draining"}).status_code == 200
    receipt = sent(api, batch, [CAT, CAT | {"model": "flux"}])
    assert (receipt["accepted"], receipt["refused"]) == (1, 1)
    assert "draining" in api.client.get(f"/batches/{batch}/errors").json["errors"][0]["message"]


def test_the_stored_error_of_an_invalid_line_is_short_and_valid_text(api: Api) -> None:
    api.model()
    batch = create(api)
    odd, long = b'{"custom_id": "\\ud800x", "payload": {}}', {"k" * 100_000: 1, "payload": {}}
    sent(api, batch, [odd, b'{"payload": {}, "a\\u0000b": 1}', long])
    first, second, third = api.client.get(f"/batches/{batch}/errors").json["errors"]
    assert (first["custom_id"], first["field"], second["field"]) == ("?x", "custom_id", "ab")
    assert len(third["field"]) <= 100 and len(third["message"]) <= 1000


# -- results -----------------------------------------------------------------------------------------------------


def test_results_are_returned_in_line_order(api: Api) -> None:
    api.register()
    batch = create(api)
    sent(api, batch, [CAT | {"custom_id": f"c{n}"} for n in range(4)])
    assert complete(api, '{"url": "x"}') == line_job_id(batch, 0)
    api.client.post(f"/queue/jobs/{line_job_id(batch, 2)}/cancel")
    all_lines = results(api, batch)
    assert [line["line"] for line in all_lines] == [0, 1, 2, 3]
    assert [line["custom_id"] for line in all_lines] == ["c0", "c1", "c2", "c3"]
    assert all_lines[0]["result"] == {"url": "x"} and all_lines[2]["error"]["code"] == "canceled"
    assert [line["line"] for line in results(api, batch, "?ended=true")] == [0, 2]
    page = api.client.get(f"/batches/{batch}/results?from=1&limit=2")
    assert page.headers["Next-Line"] == "3" and len(page.data.splitlines()) == 2
    assert "Next-Line" not in api.client.get(f"/batches/{batch}/results?from=3").headers


def test_a_page_of_results_is_limited_in_bytes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.model()
    batch = create(api)
    sent(api, batch, [CAT] * 5)
    monkeypatch.setattr("app.api.batch_views._MAX_PAGE_BYTES", 1)
    page = api.client.get(f"/batches/{batch}/results")
    assert (len(page.data.splitlines()), page.headers["Next-Line"]) == (1, "1")


def test_a_batch_that_is_not_there_is_not_found(api: Api) -> None:
    for path in ("", "/errors", "/results"):
        assert api.client.get(f"/batches/{new_job_id()}{path}").status_code == 404
    with pytest.raises(NotFound):
        require(None, "x")
