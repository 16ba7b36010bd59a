import json

import pytest
from flask import Flask

from app import problems
from slotkeeper import errors as job_errors
from slotkeeper.errors import Conflict, InvalidRequest, InvalidSetting, JobNotFound, SlotkeeperError, TooManyRequests


@pytest.fixture
def app():
    made = Flask("test", static_folder=None)
    problems.register_error_handlers(made)
    return made


def _raised(app: Flask, error: Exception):
    def fail():
        raise error

    app.add_url_rule("/fail", "fail", fail)
    return app.test_client().get("/fail")


def _made(kind: type[SlotkeeperError]) -> SlotkeeperError:
    if issubclass(kind, InvalidRequest):
        return kind("payload", "payload is wrong")
    return kind("wrong", 1.5) if issubclass(kind, TooManyRequests) else kind("wrong")


KINDS = [
    kind
    for kind in vars(job_errors).values()
    if isinstance(kind, type)
    and issubclass(kind, SlotkeeperError)
    and kind not in (SlotkeeperError, InvalidSetting)  # the latter ends a process before it serves
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_refusal_of_a_use_case_has_a_status_and_its_own_code(app, kind):
    answer = _raised(app, _made(kind))
    assert answer.status_code in (401, 402, 403, 404, 409, 422, 429, 503)
    assert answer.json["code"] == kind.code
    assert answer.json["title"] == (kind.__doc__ or "").splitlines()[0].rstrip(".")
    assert ("Retry-After" in answer.headers) == (answer.status_code in (429, 503))


def test_retry_after_is_at_least_one_whole_second(app):
    assert _raised(app, TooManyRequests("slow down", 0.001)).headers["Retry-After"] == "1"


def test_extra_facts_do_not_replace_the_fields_of_the_rfc(app):
    response = _raised(
        app, Conflict("It has ended.", status="completed", type="x", title="y", instance="z", job_id="j")
    )
    assert (response.json["status"], response.json["job_status"], response.json["instance"]) == (
        409,
        "completed",
        "/fail",
    )
    assert response.json["type"] == "urn:slotkeeper:problem:conflict"
    assert response.json["job_id"] == "j"


def test_a_problem_with_client_input_is_encoded_and_shortened(app):
    response = _raised(app, JobNotFound("There is no job '\udc80'" + "x" * 10_000))
    assert len(json.loads(response.data)["detail"]) == 500
