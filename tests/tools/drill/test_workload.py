"""The client's records of the responses to its submits."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from tools.drill import workload
from tools.drill.workload import Clients, PlannedJob

PLANNED = PlannedJob(0, 0.0, "zimg", 5, {"number": 0, "seconds": 0.1})
NOT_STORED = {"title": "The database cannot be reached", "detail": "Nothing was stored, try again."}
UNKNOWN = {"title": "The database cannot be reached", "detail": "Whether the job was stored is not known."}


@pytest.fixture
def api() -> Iterator[HTTPServer]:
    with HTTPServer(host="127.0.0.1") as server:
        yield server


def accepted(deduplicated: bool = False, job_id: str = "j") -> Response:
    return answer_with(202, {"job_id": job_id, "deduplicated": deduplicated})


def answer_with(status: int, body: dict[str, Any], **headers: str) -> Response:
    return Response(orjson.dumps(body), status, headers or {"Retry-After": "0"}, content_type="application/json")


def submit_all(api: HTTPServer, *answers: Response, planned_jobs: tuple[PlannedJob, ...] = (PLANNED,)) -> Clients:
    """Return clients that have got these answers, one after the other."""
    for answer in answers:
        api.expect_ordered_request("/queue/submit", "POST").respond_with_response(answer)
    clients = Clients(api.url_for("").rstrip("/"), planned_jobs, 1, lambda number: f"http://hook/{number}")
    clients.start()
    assert clients.join(10)
    return clients


def test_an_accepted_job_has_a_receipt(api: HTTPServer) -> None:
    clients = submit_all(api, accepted())
    assert [receipt.job_id for receipt in clients.receipts] == ["j"]
    assert clients.planned_by_id == {"j": PLANNED}
    assert (clients.false_denials, clients.late, clients.doubled_ids, clients.refusals) == ([], [], [], {})


def test_not_stored_is_false_if_the_same_key_is_known_afterwards(api: HTTPServer) -> None:
    assert len(submit_all(api, answer_with(503, NOT_STORED), accepted(deduplicated=True)).false_denials) == 1


def test_not_stored_is_true_if_the_job_is_new_afterwards(api: HTTPServer) -> None:
    assert submit_all(api, answer_with(503, NOT_STORED), accepted()).false_denials == []


@pytest.mark.parametrize(
    "others", [(answer_with(503, UNKNOWN),), (answer_with(503, NOT_STORED), answer_with(503, UNKNOWN))]
)
def test_an_answer_that_leaves_it_open_is_no_false_denial(api: HTTPServer, others: tuple[Response, ...]) -> None:
    assert submit_all(api, *others, accepted(deduplicated=True)).false_denials == []


def test_an_id_returned_for_two_planned_jobs_is_recorded(api: HTTPServer) -> None:
    second = PlannedJob(1, 0.0, "zimg", 5, {"number": 1, "seconds": 0.1})
    assert submit_all(api, accepted(), accepted(), planned_jobs=(PLANNED, second)).doubled_ids == ["j"]


def test_a_late_response_is_recorded(api: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_LATE_S", 0.0)
    assert len(submit_all(api, accepted()).late) == 1


def test_an_unexpected_answer_is_a_refusal(api: HTTPServer) -> None:
    assert submit_all(api, answer_with(500, {"title": "oh"}), accepted()).refusals == {"500": 1}


def test_all_attempts_of_a_job_with_a_deadline_and_a_receiver_send_the_same_body(api: HTTPServer) -> None:
    bodies = []

    def respond(request: Request) -> Response:
        bodies.append(orjson.loads(request.data))
        return accepted() if len(bodies) > 1 else answer_with(503, NOT_STORED)

    api.expect_request("/queue/submit").respond_with_handler(respond)
    with_deadline = PlannedJob(3, 0.0, "zimg", 9, {"number": 3, "seconds": 0.1}, hooked=True, expires_s=5.0)
    submit_all(api, planned_jobs=(with_deadline,))
    assert bodies[0] == bodies[1]
    assert bodies[0]["callback_url"] == "http://hook/3"
    assert 4 < bodies[0]["ttl"] <= 5


def test_a_deadline_may_be_refused_as_hopeless_and_nothing_else_may(api: HTTPServer) -> None:
    with_deadline = PlannedJob(3, 0.0, "zimg", 9, {"number": 3, "seconds": 0.1}, expires_s=5.0)
    clients = submit_all(api, answer_with(422, {}), answer_with(422, {}), planned_jobs=(with_deadline, PLANNED))
    assert clients.answers == {"422 hopeless": 1, "422": 1}
    assert (clients.refusals, clients.gave_up) == ({"422": 1}, [0])
