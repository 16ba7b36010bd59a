import pytest
from pydantic import ValidationError

from app.schemas.base import StateBody
from app.schemas.job_schemas import BatchItem, SubmitBody
from app.schemas.model_schemas import ConfigBody
from app.schemas.server_schemas import RegisterBody

BODIES = [SubmitBody, BatchItem, RegisterBody, StateBody, ConfigBody]


@pytest.mark.parametrize("body", BODIES)
def test_only_a_few_of_many_unknown_fields_are_reported(body):
    with pytest.raises(ValidationError) as raised:
        body.model_validate({f"x{n}": n for n in range(10_000)})
    unknown = [error for error in raised.value.errors() if error["type"] == "extra_forbidden"]
    assert len(unknown) == 20


def test_known_fields_among_many_unknown_ones_are_validated():
    sent = {f"x{n}": n for n in range(10_000)} | {"state": "asleep"}
    with pytest.raises(ValidationError) as raised:
        StateBody.model_validate(sent)
    assert ("state",) in [error["loc"] for error in raised.value.errors()]


def test_an_integer_may_be_written_as_a_float():
    body = SubmitBody.model_validate({"model": "zimg", "payload": {"n": 7.0}, "priority": 1.0, "ttl": 2.5})
    assert (body.priority, body.ttl) == (1, 2.5)
    assert isinstance(body.priority, int)
    assert isinstance(body.payload["n"], float)
    assert ConfigBody.model_validate({"capacity": 10.0, "tenant_slot_limits": {"a": 2.0}}).capacity == 10
