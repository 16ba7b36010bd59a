"""POST /queue/submit and /queue/submit-batch: accepted jobs are in the database, refused requests store nothing."""

import io
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest

from app.request_json import BODY_COMPLETE
from slotkeeper.clock import now_ms
from slotkeeper.jobs.states import State
from tests.support import passes
from tests.support.api import NOTHING, Api
from tests.support.ends import end_run_with

MIB = 1 << 20
CHUNKED: dict[str, Any] = {"CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}


# -- accepted --------------------------------------------------------------------------------------------------


def test_a_submitted_job_is_in_the_database_before_the_response(api: Api) -> None:
    api.model()
    answer = api.submit(priority=2, ttl=60, callback_url="https://client.example/hook")
    job = api.job(answer.json["job_id"])
    assert answer.status_code == 202
    assert answer.headers["Location"] == answer.json["links"]["self"] == f"/queue/jobs/{job.id}"
    assert (job.state, job.model, job.priority, job.tenant) == (State.QUEUED, "zimg", 2, "default")
    assert job.payload == '{"prompt":"a cat"}'
    assert job.callback_url == "https://client.example/hook"
    assert job.deadline_ms == job.created_ms + 60_000


def test_the_position_counts_from_one_and_by_priority(api: Api) -> None:
    api.model()
    assert [api.submit().json["position"] for _ in range(3)] == [1, 2, 3]
    assert api.submit(priority=True).json["position"] == 1
    assert api.submit(priority=9).json["position"] == 5


def test_a_submit_sends_one_command_to_redis_and_returns_the_jobs_position(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.register(slots=1)
    api.submitted()  # Redis knows the script.
    asked: list[str] = []
    scripts = api.dispatcher.queues.scripts
    run_all = scripts.run_all
    monkeypatch.setattr(
        scripts,
        "run_all",
        lambda commands: asked.extend(command.target.script for command in commands) or run_all(commands),
    )
    assert [api.submit().json["position"] for _ in range(3)] == [1, 2, 3]
    assert asked == ["enqueue"] * 3


def test_a_deduplicated_submit_returns_the_current_position_of_the_job(api: Api) -> None:
    api.model()
    key = {"Idempotency-Key": "k"}
    assert [api.submit(key).json["position"], api.submit().json["position"]] == [1, 2]
    again = api.submit(key).json
    assert (again["deduplicated"], again["position"]) == (True, 1)


def test_a_job_that_is_offered_at_once_has_no_position(api: Api) -> None:
    api.register(slots=1)
    first, second = api.submit(), api.submit()
    assert [offer.job_id for offer in api.notifications.offers] == [first.json["job_id"]]
    assert (first.json["position"], second.json["position"]) == (None, 1)


def test_the_start_is_estimated_from_the_latest_runs(api: Api) -> None:
    api.register(slots=2)
    from slotkeeper.jobs.states import Reason

    for _ in range(2):
        task = api.started()
        end_run_with(api.dispatcher, task, Reason.FINISHED, result="{}")
    api.submitted(), api.submitted()
    estimate = api.submit().json["estimated_start_s"]
    assert estimate is not None
    assert 0 <= estimate < 5


@pytest.mark.parametrize("moment", ["2001-01-01T00:00:00Z", "0001-01-01T00:00:00+23:59", 0])
def test_a_not_before_in_the_past_queues_the_job_at_once(api: Api, moment: Any) -> None:
    api.model()
    assert api.job(api.submitted(not_before=moment)).state is State.QUEUED


@pytest.mark.parametrize("asked, priority", [(None, 5), (False, 5), (True, 1), (1, 1), (9, 9)])
def test_a_priority_is_a_number_or_true_for_the_most_urgent(api: Api, asked: Any, priority: int) -> None:
    api.model()
    assert api.job(api.submitted(priority=asked)).priority == priority


def test_not_before_accepts_a_point_in_time_or_a_number_of_seconds(api: Api) -> None:
    api.model()
    moment = datetime.now(UTC) + timedelta(hours=1)
    by_moment = api.job(api.submitted(not_before=moment.astimezone().isoformat()))
    by_seconds = api.job(api.submitted(not_before=3600.5))
    assert by_moment.state is by_seconds.state is State.DELAYED
    assert abs(by_moment.due_ms - moment.timestamp() * 1000) <= 1
    assert by_seconds.due_ms == by_seconds.created_ms + 3_600_500


def test_a_payload_is_stored_with_its_exact_numbers_and_texts(api: Api) -> None:
    api.model()
    sent = {"big": 2**63 - 1, "small": -(2**63), "third": 0.1, "text": "ü\u2028🐈", "deep": [[[{}]]]}
    assert orjson.loads(api.job(api.submitted(payload=sent)).payload or "") == sent


# -- the same request again ------------------------------------------------------------------------------------


def test_the_same_key_names_the_same_job(api: Api) -> None:
    api.model()
    moment = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    first, again = (api.submit({"Idempotency-Key": "k-1"}, not_before=moment) for _ in range(2))
    assert (first.json["deduplicated"], again.json["deduplicated"]) == (False, True)
    assert first.json["job_id"] == again.json["job_id"]
    assert api.stored()["jobs"] == 1


def test_the_same_key_with_another_request_is_a_conflict(api: Api) -> None:
    api.model()
    api.submitted({"Idempotency-Key": "k-1"})
    answer = api.submit({"Idempotency-Key": "k-1"}, payload={"prompt": "a dog"})
    assert (answer.status_code, answer.json["code"]) == (409, "idempotency_conflict")
    assert api.stored()["jobs"] == 1


@pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true"}])
def test_the_same_key_of_another_tenant_is_another_job(api: Api, settings: dict[str, str]) -> None:
    boss, acme, zeta = api.tenant("boss", admin=True), api.tenant("acme"), api.tenant("zeta")
    api.client.put("/admin/model-configs/zimg", json={}, headers=boss)
    ids = {api.submitted(header | {"Idempotency-Key": "k-1"}) for header in (acme, zeta)}
    assert len(ids) == 2


# -- parts that are away ---------------------------------------------------------------------------------------


def test_without_redis_a_job_is_accepted_and_is_enqueued_later(mortal_api: Api) -> None:
    api = mortal_api
    api.model()
    api.valkey.kill()
    answer = api.submit()
    assert (answer.status_code, answer.json["position"]) == (202, None)
    assert api.job(answer.json["job_id"]).state is State.QUEUED
    api.valkey.start()
    passes.reconcile(api.dispatcher)
    assert api.client.get(answer.json["links"]["self"]).json["position"] == 1


def test_a_submit_gets_503_with_retry_after_while_the_database_is_down(api: Api) -> None:
    api.model()
    api.submitted()
    before = api.stored()
    api.take_database_away()
    answer = api.submit({"Idempotency-Key": "k-1"})
    api.bring_database_back()
    assert (answer.status_code, answer.json["code"]) == (503, "record_unavailable")
    assert int(answer.headers["Retry-After"]) >= 1
    assert api.stored() == before


def test_a_submit_to_a_full_queue_is_refused_with_retry_after(api: Api) -> None:
    api.model(max_waiting=1)
    api.submitted()
    answer = api.submit()
    assert (answer.status_code, answer.json["code"]) == (429, "too_many_requests")
    assert int(answer.headers["Retry-After"]) >= 1
    assert api.stored()["jobs"] == 1


@pytest.mark.parametrize("closed", [{"max_waiting": 0}, {"state": "draining"}], ids=str)
def test_a_request_that_was_accepted_is_answered_again_when_nothing_new_is_accepted_any_more(
    api: Api, closed: dict[str, Any]
) -> None:
    api.model()
    first = api.submit(headers={"Idempotency-Key": "once"})
    api.submitted()
    if "state" in closed:
        assert api.client.patch("/admin/models/zimg", json=closed).status_code == 200
    else:
        api.model(**closed)
    assert api.submit().status_code in (409, 429)
    again = api.submit(headers={"Idempotency-Key": "once"})
    assert (again.status_code, again.json["job_id"], again.json["deduplicated"]) == (202, first.json["job_id"], True)
    assert api.submit(headers={"Idempotency-Key": "another"}).status_code in (409, 429)


# -- refused ---------------------------------------------------------------------------------------------------

_JOB = {"model": "zimg", "payload": {}}


def _raw(**fields: Any) -> bytes:
    return orjson.dumps(_JOB | fields)


def _deep(levels: int) -> bytes:
    return b'{"model":"zimg","payload":{"a":%s%s}}' % (b"[" * levels, b"]" * levels)


@pytest.mark.parametrize(
    "name, advice", [("zimgg", "did you mean 'zimg'?"), ("nobody", "`slotkeeper models list`"), ("z" * 100, "list`")]
)
def test_the_error_for_an_unknown_model_suggests_a_similar_name(api: Api, name: str, advice: str) -> None:
    api.register()
    answer = api.client.post("/queue/submit", json={"model": name, "payload": {}})
    assert (answer.status_code, advice in answer.json["detail"]) == (422, True), answer.json


# what is sent, status, code, the field that is named
BAD: dict[str, tuple[bytes, int, str, str | None]] = {
    "unknown model": (_raw(model="nobody"), 422, "unknown_model", "model"),
    "model is a number": (_raw(model=7), 422, "invalid_request", "model"),
    "model with NUL": (_raw(model="zi\0mg"), 422, "unknown_model", "model"),
    "model too long": (_raw(model="m" * 10_000), 422, "invalid_request", "model"),
    "no model": (b'{"payload":{}}', 422, "invalid_request", "model"),
    "no payload": (b'{"model":"zimg"}', 422, "invalid_request", "payload"),
    "empty object": (b"{}", 422, "invalid_request", "model"),
    "payload is a text": (_raw(payload="a cat"), 422, "invalid_job", "payload"),
    "payload is null": (_raw(payload=None), 422, "invalid_job", "payload"),
    "payload too large": (_raw(payload={"a": "x" * 1000}), 422, "invalid_job", "payload"),
    "payload with NUL": (_raw(payload={"a": "x\0"}), 422, "invalid_job", "payload"),
    "payload with NUL in a key": (_raw(payload={"x\0": [{"y": 1}]}), 422, "invalid_job", "payload"),
    "payload with half a character": (b'{"model":"zimg","payload":{"a":"\\ud800"}}', 422, "invalid_job", "payload"),
    "payload with an endless number": (b'{"model":"zimg","payload":{"a":1e999}}', 422, "invalid_job", "payload"),
    "payload nested": (_deep(100), 422, "invalid_job", "payload"),
    "nesting bomb": (_deep(100_000), 400, "malformed_json", None),
    "not closed": (b'{"model":"zimg"', 400, "malformed_json", None),
    "two values": (b"{}{}", 400, "malformed_json", None),
    "nothing": (b"", 400, "malformed_json", None),
    "NaN": (b'{"model":"zimg","payload":{"a":NaN}}', 400, "malformed_json", None),
    "Infinity": (b'{"model":"zimg","payload":{"a":-Infinity}}', 400, "malformed_json", None),
    "no UTF-8": (b'{"model":"zimg","payload":{"a":"\xff"}}', 400, "malformed_json", None),
    "a number of 5000 digits": (b'{"model":"zimg","payload":{"a":%s}}' % (b"9" * 5000), 422, "invalid_request", "body"),
    "a key twice": (b'{"model":"zimg","model":"flux","payload":{}}', 400, "malformed_json", None),
    "a list": (b"[]", 422, "invalid_request", None),
    "a text that holds JSON": (orjson.dumps(_raw().decode()), 422, "invalid_request", None),
    "callback is no URL": (_raw(callback_url="client.example"), 422, "invalid_job", "callback_url"),
    "callback is a file": (_raw(callback_url="file:///etc/passwd"), 422, "invalid_job", "callback_url"),
    "callback to ourselves": (_raw(callback_url="http://127.0.0.1/x"), 422, "invalid_job", "callback_url"),
    "callback to the cloud": (_raw(callback_url="http://169.254.169.254/latest"), 422, "invalid_job", "callback_url"),
    "callback is a number": (_raw(callback_url=7), 422, "invalid_request", "callback_url"),
    "unknown field": (_raw(callbackurl="https://a.example"), 422, "invalid_request", "callbackurl"),
    "odd field": (b'{"model":"zimg","payload":{},"\\ud800":1}', 422, "invalid_request", "body"),
    "priority 0": (_raw(priority=0), 422, "invalid_job", "priority"),
    "priority 10": (_raw(priority=10), 422, "invalid_job", "priority"),
    "priority in words": (_raw(priority="high"), 422, "invalid_job", "priority"),
    "priority in parts": (_raw(priority=2.5), 422, "invalid_job", "priority"),
    "ttl negative": (_raw(ttl=-1), 422, "invalid_job", "ttl"),
    "ttl endless": (b'{"model":"zimg","payload":{},"ttl":1e999}', 422, "invalid_job", "ttl"),
    "ttl huge": (b'{"model":"zimg","payload":{},"ttl":1%s}' % (b"0" * 400), 422, "invalid_job", "ttl"),
    "ttl in words": (_raw(ttl="soon"), 422, "invalid_job", "ttl"),
    "ttl true": (_raw(ttl=True), 422, "invalid_job", "ttl"),
    "ttl before not_before": (_raw(ttl=5, not_before=10), 422, "invalid_job", "ttl"),
    "not_before without a zone": (_raw(not_before="2030-01-01T00:00:00"), 422, "invalid_job", "not_before"),
    "not_before in words": (_raw(not_before="tomorrow"), 422, "invalid_job", "not_before"),
    "not_before in an age": (_raw(not_before="9999-12-31T00:00:00Z"), 422, "invalid_job", "not_before"),
    "not_before is a list": (_raw(not_before=[1]), 422, "invalid_job", "not_before"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_its_field_and_leaves_no_trace(api: Api, case: str) -> None:
    body, status, code, field = BAD[case]
    api.model(max_payload_bytes=500)
    answer = api.client.post("/queue/submit", data=body, content_type="application/json")
    problem = answer.json
    assert (answer.status_code, problem["code"], problem.get("field")) == (status, code, field), answer.text
    assert answer.content_type == "application/problem+json"
    assert {"type", "title", "status", "detail", "instance"} <= problem.keys()
    assert field is None or field in problem["detail"]
    assert api.stored() == NOTHING


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
def test_a_key_that_cannot_be_kept_is_refused(api: Api, key: str) -> None:
    api.model()
    answer = api.submit({"Idempotency-Key": key})
    assert (answer.status_code, answer.json["field"]) == (422, "Idempotency-Key")
    assert api.stored() == NOTHING


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "a b"])
def test_a_submit_with_another_content_type_than_json_is_refused(api: Api, kind: str) -> None:
    api.model()
    answer = api.client.post("/queue/submit", data=_raw(), content_type=kind)
    assert (answer.status_code, answer.json["code"]) == (415, "unsupported_media_type")
    assert api.stored() == NOTHING


class _CountingBody(io.BytesIO):
    """A request body that records the bytes read and the largest piece."""

    largest = total = 0

    def read(self, size: int | None = -1) -> bytes:
        piece = super().read(size)
        self.largest, self.total = max(self.largest, len(piece)), self.total + len(piece)
        return piece


@pytest.mark.parametrize("path", ["/queue/submit", "/queue/submit-batch", "/admin/register"])
def test_a_body_that_is_too_large_is_read_to_its_end_and_not_stored(api: Api, path: str) -> None:
    body = _CountingBody(bytes(17 * MIB))
    answer = api.client.post(path, content_type="application/json", input_stream=body)
    assert (answer.status_code, answer.json["status"]) == (413, 413)
    assert "SLOTKEEPER_MAX_BODY_BYTES" in answer.json["detail"]
    assert body.total == 17 * MIB
    assert body.largest <= 64 << 10


def test_a_body_far_above_the_limit_is_not_read(api: Api) -> None:
    body = _CountingBody(bytes(33 * MIB))
    answer = api.client.post("/queue/submit", content_type="application/json", input_stream=body)
    assert (answer.status_code, body.total) == (413, 0)


@pytest.mark.parametrize(
    "path, kind", [("/queue/submit", "application/json"), ("/queue/submit-batch", "application/x-ndjson")]
)
def test_a_body_of_unannounced_length_is_refused_and_not_cut_short(api: Api, path: str, kind: str) -> None:
    """The part up to the limit would be valid alone."""
    api.model()
    line = _raw() + b"\n"
    body = line.ljust(16 * MIB if "batch" in path else 2 * MIB) + line
    chunked = CHUNKED | {BODY_COMPLETE: True}
    answer = api.client.post(path, content_type=kind, input_stream=io.BytesIO(body), environ_overrides=chunked)
    assert answer.status_code == 413
    assert api.stored() == NOTHING


def test_a_body_of_unannounced_length_may_be_as_long_as_an_announced_one(api: Api) -> None:
    api.model()
    body = _raw().ljust(2 * MIB)
    for how in (CHUNKED, {"CONTENT_LENGTH": str(len(body))}):
        answer = api.client.post(
            "/queue/submit", content_type="application/json", input_stream=io.BytesIO(body), environ_overrides=how
        )
        assert answer.status_code == 202, answer.text


BROKEN_OFF = [
    ("/queue/submit", "application/json", b"%s   "),
    ("/queue/submit-batch", "application/json", b"[%s]   "),
    ("/queue/submit-batch", "application/x-ndjson", b"%s\n%s"),
]


@pytest.mark.parametrize("digits", [str(2**64), str(-(2**63) - 1), "7" * 4300])
def test_an_integer_of_up_to_4300_digits_is_stored_exactly_in_the_payload(api: Api, digits: str) -> None:
    api.model()
    body = _raw().replace(b"a cat", b"a dog").replace(b'"payload":', b'"payload":{"n":' + digits.encode() + b',"p":', 1)
    answer = api.client.post("/queue/submit", data=body[:-1] + b"}}", content_type="application/json")
    assert answer.status_code == 202, answer.text
    assert f'"n":{digits}' in (api.job(answer.json["job_id"]).payload or "")


@pytest.mark.parametrize("field", ["priority", "ttl", "not_before", "constraints", "model", "callback_url"])
def test_a_number_beyond_all_bounds_is_refused_where_another_is_meant(api: Api, field: str) -> None:
    api.model()
    value = b'{"gpu":%d}' if field == "constraints" else b"%d"
    body = b'{"model":"zimg","payload":{},"%s":%s}' % (field.encode(), value % 2**80)
    answer = api.client.post(
        "/queue/submit",
        data=body.replace(b'"model":"zimg",', b"" if field == "model" else b'"model":"zimg",'),
        content_type="application/json",
    )
    assert answer.status_code == 422, answer.text


@pytest.mark.parametrize("field", ["constraints", "ttl", "unknown"])
def test_deep_nesting_beside_a_long_integer_is_a_client_error(api: Api, field: str) -> None:
    api.model()
    deep = b"[" * 900 + b"]" * 900
    body = b'{"model":"zimg","payload":{},"%s":%s,"z":%d}' % (field.encode(), deep, 10**30)
    answer = api.client.post("/queue/submit", data=body, content_type="application/json")
    assert answer.status_code in (400, 422), answer.text


@pytest.mark.parametrize("path, kind, body", BROKEN_OFF)
def test_an_incomplete_request_body_is_refused(api: Api, path: str, kind: str, body: bytes) -> None:
    """The received part would be valid by itself."""
    api.model()
    arrived = body.replace(b"%s", _raw())
    length = {"CONTENT_LENGTH": str(len(arrived) + 1), "wsgi.input_terminated": True}
    answer = api.client.post(path, content_type=kind, input_stream=io.BytesIO(arrived), environ_overrides=length)
    assert answer.status_code == 400, answer.text
    assert api.stored() == NOTHING


def test_lines_without_a_known_end_of_the_body_are_refused(api: Api) -> None:
    """A body that breaks off between two lines looks like a shorter batch."""
    api.model()
    for seen, status in (({}, 411), ({BODY_COMPLETE: True}, 202)):
        answer = api.client.post(
            "/queue/submit-batch",
            content_type="application/x-ndjson",
            input_stream=io.BytesIO(_raw() + b"\n"),
            environ_overrides=CHUNKED | seen,
        )
        assert answer.status_code == status
        assert (api.stored() == NOTHING) is (status == 411)


@pytest.mark.parametrize("path", ["/queue/submit", "/queue/submit-batch", "/admin/model-configs/zimg"])
def test_only_a_few_of_many_unknown_fields_are_reported(api: Api, path: str) -> None:
    api.model()
    body: Any = {f"x{n}": n for n in range(10_000)}
    if path.endswith("batch"):
        body = [body] * 3
    answer = api.client.open(path, method="PUT" if "config" in path else "POST", json=body)
    assert answer.status_code == 422
    assert len(answer.json["errors"]) <= 22
    assert len(answer.data) < 10_000


def test_a_payload_of_ten_megabytes_is_refused(api: Api) -> None:
    api.model()
    answer = api.submit(payload={"a": "x" * (10 * MIB)})
    assert answer.status_code == 413
    assert api.stored() == NOTHING


def test_a_typo_is_answered_with_the_nearest_name(api: Api) -> None:
    api.model()
    assert "callback_url" in api.submit(callbak_url="https://a.example").json["detail"]


# -- batches ---------------------------------------------------------------------------------------------------


def _batch(api: Api, *jobs: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    return api.client.post("/queue/submit-batch", json=list(jobs), headers=headers)


def test_a_batch_is_accepted_in_its_order(api: Api) -> None:
    api.model()
    answer = _batch(api, *({**_JOB, "payload": {"n": n}} for n in range(20)))
    ids = [job["job_id"] for job in answer.json["jobs"]]
    assert (answer.status_code, answer.json["accepted"]) == (202, 20)
    assert [orjson.loads(api.job(job_id).payload or "")["n"] for job_id in ids] == list(range(20))
    assert [job.id for job in api.dispatcher.store.list_queued(["zimg"])] == ids


def test_a_batch_may_be_sent_as_lines(api: Api) -> None:
    api.model()
    lines = b"\n".join([_raw(), b"", _raw(priority=1), b""])
    answer = api.client.post("/queue/submit-batch", data=lines, content_type="application/x-ndjson; charset=utf-8")
    assert [api.job(job["job_id"]).priority for job in answer.json["jobs"]] == [5, 1]


BAD_ITEMS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"model": "zimg"}, "payload"),
    "unknown model": ({"model": "nobody", "payload": {}}, "model"),
    "wrong type": ({"model": 1, "payload": {}}, "model"),
    "bad priority": (_JOB | {"priority": 0}, "priority"),
    "bad moment": (_JOB | {"not_before": "soon"}, "not_before"),
    "bad address": (_JOB | {"callback_url": "http://localhost/"}, "callback_url"),
}


@pytest.mark.parametrize("case", BAD_ITEMS)
def test_one_invalid_job_refuses_the_batch_and_its_index_is_reported(api: Api, case: str) -> None:
    item, field = BAD_ITEMS[case]
    api.model()
    answer = _batch(api, _JOB, _JOB, item, _JOB)
    assert (answer.status_code, answer.json["index"]) == (422, 2)
    assert answer.json["field"].endswith(field)
    assert api.stored() == NOTHING


def test_a_line_that_is_no_json_is_named(api: Api) -> None:
    api.model()
    lines = b"\n".join([_raw(), b"{"])
    answer = api.client.post("/queue/submit-batch", data=lines, content_type="application/x-ndjson")
    assert (answer.status_code, answer.json["code"], answer.json["index"]) == (400, "malformed_json", 1)
    assert api.stored() == NOTHING


@pytest.mark.parametrize("body", [b"{}", b"[]", b"[1]", b"[[]]", b"null", b"[" + b"{}," * 1000 + b"{}]"])
def test_a_body_that_is_not_a_batch_of_jobs_is_refused(api: Api, body: bytes) -> None:
    answer = api.client.post("/queue/submit-batch", data=body, content_type="application/json")
    assert answer.status_code == 422
    assert api.stored() == NOTHING


def test_an_overlong_batch_is_refused_at_its_first_invalid_job_without_parsing_the_rest(api: Api) -> None:
    """Parsing millions of values at once would delay the threads of other requests."""
    body = b"[" + b"0," * 7_000_000 + b"nothing"
    answer = api.client.post("/queue/submit-batch", data=body, content_type="application/json")
    assert (answer.status_code, answer.json["index"]) == (422, 0)


@pytest.mark.parametrize("kind, form", [("application/json", b"[%s,%s]"), ("application/x-ndjson", b"%s\n%s\n")])
def test_a_job_of_a_batch_is_no_longer_than_one_alone_may_be(api: Api, kind: str, form: bytes) -> None:
    api.model()
    long = b'{"model":"zimg","payload":{"a":[' + b"0," * MIB + b"0]}}"
    answer = api.client.post("/queue/submit-batch", data=form % (_raw(), long), content_type=kind)
    assert (answer.status_code, answer.json["index"]) in ((400, 1), (422, 1))
    assert str(2 * MIB) in answer.json["detail"]


def test_a_thousand_jobs_are_a_batch(api: Api) -> None:
    api.model()
    assert _batch(api, *[_JOB] * 1000).json["accepted"] == 1000
    assert _batch(api, *[_JOB] * 1001).status_code == 422


def test_a_batch_sent_again_under_its_key_is_the_same_jobs(api: Api) -> None:
    api.model()
    jobs = [_JOB | {"payload": {"n": n}} for n in range(3)]
    first, again = (_batch(api, *jobs, headers={"Idempotency-Key": "b-1"}) for _ in range(2))
    assert [job["job_id"] for job in first.json["jobs"]] == [job["job_id"] for job in again.json["jobs"]]
    assert (first.json["accepted"], again.json["accepted"]) == (3, 0)
    changed = _batch(api, *jobs[:2], _JOB, headers={"Idempotency-Key": "b-1"})
    assert changed.status_code == 409
    assert api.stored()["jobs"] == 3


@pytest.mark.parametrize("key, status", [("", 422), ("k" * 252, 422), ("k" * 251, 202)])
def test_a_batchs_idempotency_key_must_be_short_enough_for_the_index_of_each_job(
    api: Api, key: str, status: int
) -> None:
    api.model()
    assert _batch(api, _JOB, headers={"Idempotency-Key": key}).status_code == status


def test_jobs_of_a_batch_may_have_their_own_idempotency_keys(api: Api) -> None:
    api.model()
    answer = _batch(api, _JOB | {"idempotency_key": "k"}, _JOB | {"idempotency_key": "k"})
    assert [job["deduplicated"] for job in answer.json["jobs"]] == [False, True]
    assert api.submit({"Idempotency-Key": "k"}, payload={}).json["deduplicated"]


def test_a_batch_without_the_database_leaves_nothing(api: Api) -> None:
    api.model()
    api.take_database_away()
    answer = _batch(api, _JOB, _JOB)
    api.bring_database_back()
    assert answer.status_code == 503
    assert api.stored() == NOTHING


def test_times_are_those_of_the_acceptance(api: Api) -> None:
    api.model()
    before = now_ms()
    job = api.job(api.submitted())
    assert before <= job.created_ms <= now_ms()
