"""A job's own retry policy and the expected size of its result, over REST and Celery."""

import pytest

from slotkeeper.errors import InvalidJob
from slotkeeper.registry.identity import LOCAL_IDENTITY
from tasks import options
from tests.support.api import Api

POLICY = {"max_retries": 3, "jitter": 0.2}


def test_a_job_shows_its_terms(api: Api) -> None:
    api.register()
    job_id = api.submitted(on_failure=POLICY, expected_output=512)
    shown = api.client.get(f"/queue/jobs/{job_id}").json
    assert (shown["on_failure"], shown["expected_output"]) == (POLICY, 512)
    plain = api.client.get(f"/queue/jobs/{api.submitted()}").json
    assert (plain["on_failure"], plain["expected_output"]) == (None, None)
    assert api.job(plain["job_id"]).terms is None


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"on_failure": {"max_retries": 51}}, "on_failure.max_retries"),
        ({"on_failure": {"retries": 1}}, "on_failure.retries"),
        ({"expected_output": 0}, "expected_output"),
        ({"expected_output": True}, "expected_output"),
        ({"cancel_when_gone": 4}, "cancel_when_gone"),
        ({"cancel_when_gone": 3601}, "cancel_when_gone"),
    ],
)
def test_terms_that_are_none_are_refused(api: Api, fields: dict[str, object], field: str) -> None:
    api.register()
    answer = api.submit(**fields)
    assert (answer.status_code, answer.json["field"]) == (422, field)


def test_celery_refuses_the_option_cancel_when_gone(api: Api) -> None:
    for arguments, given in ({}, {"cancel_when_gone": 9}), ({"cancel_when_gone": 9}, {}):
        with pytest.raises(InvalidJob, match="cancel_when_gone"):
            options.read_submission("j1", ("zimg",), arguments, given, LOCAL_IDENTITY)


def test_other_terms_make_another_request(api: Api) -> None:
    api.register()
    key = {"Idempotency-Key": "one"}
    first = api.submitted(key, on_failure=POLICY)
    assert api.submitted(key, on_failure=dict(reversed(POLICY.items()))) == first
    assert api.submit(key, on_failure={"max_retries": 2}).json["code"] == "idempotency_conflict"


def test_celery_accepts_terms_as_arguments_and_as_options(api: Api) -> None:
    api.register()
    given = {"on_failure": POLICY, "expected_output": 9}
    by_option = options.read_submission("j1", ("zimg",), {}, given, LOCAL_IDENTITY)
    by_argument = options.read_submission("j2", ("zimg",), given, {}, LOCAL_IDENTITY)
    receipts = api.dispatcher.submit([by_option, by_argument], LOCAL_IDENTITY)
    stored = {api.job(receipt.accepted.id).terms for receipt in receipts}
    assert stored == {'{"expected_output":9,"on_failure":{"jitter":0.2,"max_retries":3}}'}
    with pytest.raises(InvalidJob, match="on_failure"):
        api.dispatcher.submit(
            [options.read_submission("j3", ("zimg",), {"on_failure": "never"}, {}, LOCAL_IDENTITY)], LOCAL_IDENTITY
        )
