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
def test_every_refusal_of_a_use_case_has_a_status_of_its_own(app, kind):
    answer = _raised(app, _made(kind))
    assert answer.status_code in (401, 402, 403, 404, 409, 422, 429, 503)
    assert answer.json["code"] == kind.code
    assert answer.json["title"] == (kind.__doc__ or "").splitlines()[0].rstrip(".")
    assert ("Retry-After" in answer.headers) == (answer.status_code in (429, 503))


def test_times_to_come_back_are_whole_seconds_and_never_none(app):
    assert _raised(app, TooManyRequests("slow down", 0.001)).headers["Retry-After"] == "1"


def test_facts_do_not_take_the_place_of_what_the_rfc_names(app):
    told = _raised(app, Conflict("It has ended.", status="completed", type="x", title="y", instance="z", job_id="j"))
    assert (told.json["status"], told.json["job_status"], told.json["instance"]) == (409, "completed", "/fail")
    assert told.json["type"] == "urn:slotkeeper:problem:conflict"
    assert told.json["job_id"] == "j"


def test_what_a_stranger_wrote_can_be_sent_back(app):
    told = _raised(app, JobNotFound("There is no job '\udc80'" + "x" * 10_000))
    assert len(json.loads(told.data)["detail"]) == 500
