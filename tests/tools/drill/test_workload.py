"""What a client notes of the answers to its submits."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from tools.drill import workload
from tools.drill.jobs import PlannedJob
from tools.drill.workload import Clients

ORDER = PlannedJob(0, 0.0, "zimg", 5, {"number": 0, "seconds": 0.1})
GONE = {"title": "The database cannot be reached", "detail": "Nothing was stored, try again."}
OPEN = {"title": "The database cannot be reached", "detail": "Whether the job was stored is not known."}


@pytest.fixture
def api() -> Iterator[HTTPServer]:
    with HTTPServer(host="127.0.0.1") as server:
        yield server


def accepted(deduplicated: bool = False, job_id: str = "j") -> Response:
    return said(202, {"job_id": job_id, "deduplicated": deduplicated})


def said(status: int, body: dict[str, Any], **headers: str) -> Response:
    return Response(orjson.dumps(body), status, headers or {"Retry-After": "0"}, content_type="application/json")


def submitted(api: HTTPServer, *answers: Response, orders: tuple[PlannedJob, ...] = (ORDER,)) -> Clients:
    """A client that has got these answers, one after the other."""
    for answer in answers:
        api.expect_ordered_request("/queue/submit", "POST").respond_with_response(answer)
    done = Clients(api.url_for("").rstrip("/"), orders, 1, lambda number: f"http://hook/{number}")
    done.start()
    assert done.join(10)
    return done


def test_an_accepted_job_has_a_receipt(api: HTTPServer) -> None:
    done = submitted(api, accepted())
    assert [receipt.job_id for receipt in done.receipts] == ["j"]
    assert done.orders_of == {"j": ORDER}
    assert (done.lies, done.late, done.doubled, done.refusals) == ([], [], [], {})


def test_not_stored_is_a_lie_if_the_same_key_is_known_afterwards(api: HTTPServer) -> None:
    assert len(submitted(api, said(503, GONE), accepted(deduplicated=True)).lies) == 1


def test_not_stored_is_no_lie_if_the_job_is_new_afterwards(api: HTTPServer) -> None:
    assert submitted(api, said(503, GONE), accepted()).lies == []


@pytest.mark.parametrize("others", [(said(503, OPEN),), (said(503, GONE), said(503, OPEN))])
def test_who_says_that_it_is_not_known_does_not_lie(api: HTTPServer, others: tuple[Response, ...]) -> None:
    assert submitted(api, *others, accepted(deduplicated=True)).lies == []


def test_an_id_for_two_orders_is_noted(api: HTTPServer) -> None:
    second = PlannedJob(1, 0.0, "zimg", 5, {"number": 1, "seconds": 0.1})
    assert submitted(api, accepted(), accepted(), orders=(ORDER, second)).doubled == ["j"]


def test_an_answer_that_takes_too_long_is_noted(api: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_LATE_S", 0.0)
    assert len(submitted(api, accepted()).late) == 1


def test_an_answer_that_nobody_can_use_is_a_refusal(api: HTTPServer) -> None:
    assert submitted(api, said(500, {"title": "oh"}), accepted()).refusals == {"500": 1}


def test_all_tries_of_a_job_with_a_deadline_and_a_receiver_say_the_same(api: HTTPServer) -> None:
    bodies = []

    def look(request: Request) -> Response:
        bodies.append(orjson.loads(request.data))
        return accepted() if len(bodies) > 1 else said(503, GONE)

    api.expect_request("/queue/submit").respond_with_handler(look)
    mortal = PlannedJob(3, 0.0, "zimg", 9, {"number": 3, "seconds": 0.1}, hooked=True, expires_s=5.0)
    submitted(api, orders=(mortal,))
    assert bodies[0] == bodies[1]
    assert bodies[0]["callback_url"] == "http://hook/3"
    assert 4 < bodies[0]["ttl"] <= 5


def test_a_deadline_may_be_refused_as_hopeless_and_nothing_else_may(api: HTTPServer) -> None:
    mortal = PlannedJob(3, 0.0, "zimg", 9, {"number": 3, "seconds": 0.1}, expires_s=5.0)
    done = submitted(api, said(422, {}), said(422, {}), orders=(mortal, ORDER))
    assert done.answers == {"422 hopeless": 1, "422": 1}
    assert (done.refusals, done.gave_up) == ({"422": 1}, [0])
