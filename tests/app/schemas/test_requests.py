import pytest
from pydantic import ValidationError

from app.schemas.job_schemas import BatchItem, ConfigBody, RegisterBody, StateBody, SubmitBody

BODIES = [SubmitBody, BatchItem, RegisterBody, StateBody, ConfigBody]


@pytest.mark.parametrize("body", BODIES)
def test_of_very_many_unknown_fields_only_a_few_are_looked_at(body):
    with pytest.raises(ValidationError) as refused:
        body.model_validate({f"x{n}": n for n in range(10_000)})
    unknown = [error for error in refused.value.errors() if error["type"] == "extra_forbidden"]
    assert len(unknown) == 20


def test_the_known_fields_among_very_many_are_still_looked_at():
    given = {f"x{n}": n for n in range(10_000)} | {"state": "asleep"}
    with pytest.raises(ValidationError) as refused:
        StateBody.model_validate(given)
    assert ("state",) in [error["loc"] for error in refused.value.errors()]


def test_a_whole_number_may_be_written_with_a_point():
    body = SubmitBody.model_validate({"model": "zimg", "payload": {"n": 7.0}, "priority": 1.0, "ttl": 2.5})
    assert (body.priority, body.ttl) == (1, 2.5)
    assert isinstance(body.priority, int)
    assert isinstance(body.payload["n"], float)
    assert ConfigBody.model_validate({"capacity": 10.0, "tenant_slot_limits": {"a": 2.0}}).capacity == 10
