"""A batch in one request: its lines are read from the body as they arrive."""

import http.client
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from app.server.line_stream import CHUNK_BYTES, CHUNK_LINES, LineCutter
from slotkeeper.jobs.batch_ids import line_job_id
from tests.support.api import Api
from tests.support.batch_lines import CAT, NDJSON
from tests.support.builders import eventually
from tests.support.served import Served, serve

KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])
KEY = {"Idempotency-Key": "night-1"}


@pytest.fixture
def served(api: Api) -> Iterator[Served]:
    with serve(api) as served:
        yield served


def lines_of(count: int, **fields: Any) -> list[bytes]:
    return [json.dumps(CAT | {"custom_id": f"c{n}"} | fields).encode() + b"\n" for n in range(count)]


def post(
    served: Served, parts: Sequence[bytes], query: str = "model=zimg", headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Send a chunked body, and return status and JSON of the response."""
    connection = http.client.HTTPConnection(*served.address, timeout=30)
    sent = NDJSON | (headers or {})
    connection.request("POST", f"/batches?{query}", body=iter(parts), headers=sent, encode_chunked=True)
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


def batches(api: Api, headers: dict[str, str] | None = None) -> list[Any]:
    listed: list[Any] = api.client.get("/batches", headers=headers).json["batches"]
    return listed


# -- cutting -----------------------------------------------------------------------------------------------------


def cut(parts: Sequence[bytes], longest: int = 1000) -> list[list[bytes]]:
    cutter = LineCutter(longest)
    return [chunk for part in parts for chunk in cutter.feed(part)] + list(cutter.end())


def test_lines_are_cut_wherever_the_parts_end() -> None:
    body = b"".join(lines_of(CHUNK_LINES + 3)) + b"\n  \n"
    whole = cut([body])
    assert [len(chunk) for chunk in whole] == [CHUNK_LINES, 3]
    for size in (1, 7, 4096):
        assert cut([body[at : at + size] for at in range(0, len(body), size)]) == whole
    assert cut([body.rstrip()]) == whole


def test_a_chunk_is_limited_in_bytes() -> None:
    line = b"x" * (CHUNK_BYTES // 2) + b"\n"
    assert [len(chunk) for chunk in cut([line] * 5, CHUNK_BYTES)] == [2, 2, 1]


def test_only_the_beginning_of_an_overlong_line_is_kept() -> None:
    cutter = LineCutter(10)
    assert list(cutter.feed(b"x" * 1000)) == [] and cutter.held_bytes == 11
    assert list(cutter.feed(b"x" * 1000 + b"\nshort\n")) == []
    assert list(cutter.end()) == [[b"x" * 11, b"short"]]


# -- one request -------------------------------------------------------------------------------------------------


def test_a_batch_is_sent_with_all_its_lines_in_one_request(served: Served) -> None:
    api = served.api
    api.model()
    lines = lines_of(2 * CHUNK_LINES + 5)
    status, batch = post(served, lines, "model=zimg&name=night&priority=3")
    assert (status, batch["status"], batch["next_line"], batch["name"]) == (201, "active", len(lines), "night")
    assert batch["by_state"] == {"queued": len(lines)}
    last = api.client.get(f"/queue/jobs/{line_job_id(batch['batch'], len(lines) - 1)}").json
    assert (last["priority"], last["batch"]) == (3, batch["batch"])


def test_the_same_request_again_is_the_same_batch(served: Served) -> None:
    served.api.model()
    lines = lines_of(3)
    first, again = (post(served, lines, headers=KEY) for _ in range(2))
    assert (first[0], again[0]) == (201, 200)
    assert first[1]["batch"] == again[1]["batch"] and again[1]["jobs"] == 3


def test_an_interrupted_batch_request_continues_after_its_last_stored_line(served: Served) -> None:
    api = served.api
    api.model()
    lines = lines_of(CHUNK_LINES + 10)
    connection = http.client.HTTPConnection(*served.address, timeout=30)
    connection.putrequest("POST", "/batches?model=zimg")
    for name, value in (NDJSON | KEY | {"Content-Length": "1000000"}).items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(b"".join(lines[: CHUNK_LINES + 1]))
    eventually(lambda: [batch["next_line"] for batch in batches(api)] == [CHUNK_LINES])
    connection.close()
    status, batch = post(served, lines, headers=KEY)
    assert (status, batch["jobs"], batch["next_line"]) == (200, len(lines), len(lines))


def test_an_upload_that_pauses_holds_no_thread(served: Served) -> None:
    served.api.model()
    connection = http.client.HTTPConnection(*served.address, timeout=30)
    connection.putrequest("POST", "/batches?model=zimg")
    for name, value in (NDJSON | {"Content-Length": "1000000"}).items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(lines_of(1)[0])
    eventually(lambda: len(batches(served.api)) == 1)
    pools = (served.application.general, served.application._heavy)
    eventually(lambda: all(pool.has_room and not pool._held for pool in pools))
    connection.close()


@KEYED
def test_a_429_slows_the_upload_and_refuses_nothing(served: Served, settings: dict[str, str]) -> None:
    api = served.api
    acme, root = api.tenant("acme"), api.tenant("root", admin=True)
    assert api.client.put("/admin/model-configs/zimg", json={}, headers=root).status_code == 200
    limits = {"limits": {"rate_per_s": 20, "burst": 5}}
    assert api.client.patch("/admin/tenants/acme", json=limits, headers=root).status_code == 200
    status, batch = post(served, lines_of(12), headers=acme)
    assert (status, batch["jobs"], batch["refused"]) == (201, 12, 0)


@KEYED
def test_a_batch_in_one_request_needs_a_key_that_may_submit(served: Served, settings: dict[str, str]) -> None:
    api = served.api
    assert post(served, lines_of(1))[0] == 401
    reader = api.with_key("acme", "read")  # type: ignore[arg-type]
    assert post(served, lines_of(1), headers=reader)[0] == 403
    assert batches(api, api.tenant("root", admin=True)) == []


def test_a_refusal_ends_the_request_and_what_was_stored_stays(served: Served) -> None:
    api = served.api
    api.model()
    assert post(served, lines_of(1), "model=other")[0] == 422
    connection = http.client.HTTPConnection(*served.address, timeout=30)
    sent_part = b"".join(lines_of(CHUNK_LINES + 1))
    connection.request("POST", "/batches?model=zimg", sent_part, NDJSON | KEY | {"Content-Length": str(10**6)})
    eventually(lambda: [batch["next_line"] for batch in batches(api)] == [CHUNK_LINES])
    (batch,) = batches(api)
    api.client.post(f"/batches/{batch['batch']}/cancel")
    connection.close()
    status, problem = post(served, lines_of(CHUNK_LINES + 1), headers=KEY)
    assert status == 409 and "was canceled" in problem["detail"]


def test_a_line_that_is_too_long_is_refused_alone(served: Served) -> None:
    served.api.model()
    longest = served.application.settings.max_body_bytes
    status, batch = post(served, [*lines_of(1), b"x" * (longest + 100), b"\n", *lines_of(1)])
    assert (status, batch["jobs"], batch["refused"], batch["next_line"]) == (201, 2, 1, 3)
    (error,) = served.api.client.get(f"/batches/{batch['batch']}/errors").json["errors"]
    assert (error["line"], error["message"]) == (1, f"The line has more than {longest} bytes.")


def test_a_chunk_may_be_as_large_as_a_batch_of_jobs(served: Served) -> None:
    """A client may send more in one request of lines than other requests may hold."""
    api = served.api
    api.model(max_payload_bytes=8 << 20)
    settings = served.application.settings
    assert settings.max_body_bytes < 3 << 20 < settings.max_batch_bytes
    connection = http.client.HTTPConnection(*served.address, timeout=30)
    connection.request("POST", "/batches", b'{"model": "zimg"}', {"Content-Type": "application/json"})
    batch = json.loads(connection.getresponse().read())["batch"]
    line = json.dumps({"payload": {"text": "x" * (1 << 20)}}).encode()
    connection.request("POST", f"/batches/{batch}/lines", b"\n".join([line] * 3), NDJSON)
    assert json.loads(connection.getresponse().read())["accepted"] == 3
    connection.close()


def test_bad_lines_are_errors_and_the_others_run(served: Served) -> None:
    served.api.model()
    status, batch = post(served, [*lines_of(1), b"{no json\n", *lines_of(1, priority=99), *lines_of(1)])
    assert (status, batch["jobs"], batch["refused"], batch["next_line"]) == (201, 2, 2, 4)
