from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, NamedTuple

import pytest
from pydantic import Field

from app.schemas.base import PROVIDED, From, ResponseSchema, Time, iso_time
from app.schemas.cursors import decode_job_cursor, encode_job_cursor
from app.schemas.job_schemas import job_error, next_step
from app.schemas.server_schemas import attribute_value
from routing.admission.constraints import parse_attributes
from routing.queries.positions import QueuePosition
from slotkeeper.errors import InvalidRequest
from slotkeeper.jobs.states import Reason, State
from tests.support.builders import T0


@pytest.mark.parametrize("at_ms", [0, 1, 999, T0, T0 + 1, 253_402_300_799_999])
def test_a_time_can_be_read_back_to_the_millisecond(at_ms):
    text = iso_time(at_ms)
    assert text.endswith("Z")
    when = datetime.fromisoformat(text)
    assert int(when.timestamp()) * 1000 + when.microsecond // 1000 == at_ms


def test_no_time_is_null():
    assert iso_time(None) is None


def test_a_cursor_is_decoded_to_the_encoded_value():
    class Row:
        seq = 2**63 - 1

    assert decode_job_cursor(encode_job_cursor([Row()], 1)) == Row.seq
    assert encode_job_cursor([Row()], 2) is None
    assert encode_job_cursor([], 1) is None


@pytest.mark.parametrize("cursor", ["", "x", "s", "s0", "s-1", "s1 ", "12", "ü", "s" + "1" * 20])
def test_an_invalid_cursor_is_refused(cursor):
    with pytest.raises(InvalidRequest) as raised:
        decode_job_cursor(cursor)
    assert raised.value.field == "cursor"


@pytest.mark.parametrize("given", ["A100", 80.0, "fast,testnet"])
def test_an_attribute_is_shown_as_it_was_declared(given):
    shown = attribute_value(given)
    assert parse_attributes({"it": shown}) == {"it": given}


@pytest.mark.parametrize("state", sorted(State))
def test_every_waiting_state_has_a_next_step(state):
    words = {
        next_step(state, position) for position in (QueuePosition(), QueuePosition(1), QueuePosition(offered=True))
    }
    expected = {State.QUEUED: {"unknown", "waiting", "starting"}, State.DELAYED: {"later"}}
    assert words == expected.get(state, {None})


def test_dead_jobs_have_separate_codes_for_crashes_and_retries(a_row):
    dead = replace(a_row, state=State.DEAD, error_code="boom", error_message="x")
    for why, code in (
        (Reason.RETRIES_EXHAUSTED, "max_retries_exceeded"),
        (Reason.CRASHES_EXHAUSTED, "max_crashes_exceeded"),
    ):
        assert job_error(replace(dead, why=why)) == {"code": code, "message": "x", "last_code": "boom"}
    assert job_error(replace(dead, state=State.FAILED, why=Reason.INVALID_REQUEST))["code"] == "boom"


@dataclass(frozen=True, slots=True)
class Thing:
    id: str
    created_ms: int
    ended_ms: int | None
    counts: dict[State, int]


class ThingView(ResponseSchema, source=Thing):
    thing: Annotated[str, From("id")]
    created_at: Time
    ended_at: Time | None
    counts: dict[str, int]
    letters: Annotated[int, From(lambda thing: len(thing.id))]
    notice: Annotated[str | None, PROVIDED]


class ThingList(ResponseSchema):
    things: list[ThingView]


THING = Thing("ab", T0, None, {State.QUEUED: 1})


def test_a_response_has_the_fields_of_its_class():
    assert ThingView.build(THING, notice="x") == {
        "thing": "ab",
        "created_at": iso_time(T0),
        "ended_at": None,
        "counts": {"queued": 1},
        "letters": 2,
        "notice": "x",
    }


class Pair(NamedTuple):
    first: Thing | None
    rest: tuple[Thing, ...]


class PlainView(ResponseSchema, source=Thing):
    id: str


class PairView(ResponseSchema, source=Pair):
    first: PlainView | None
    rest: list[PlainView]


def test_a_nested_response_is_built_by_its_class():
    assert PairView.build(Pair(None, (THING,))) == {"first": None, "rest": [{"id": "ab"}]}
    assert PairView.build(Pair(THING, ())) == {"first": {"id": "ab"}, "rest": []}


def test_a_missing_provided_field_is_an_error():
    with pytest.raises(TypeError, match=r"ThingView\.build must be given notice"):
        ThingView.build(THING)
    with pytest.raises(TypeError, match="ThingList has no thing"):
        ThingList.build(things=[], thing=1)


def test_a_field_without_a_source_is_an_error_of_the_class():
    with pytest.raises(TypeError, match="Thing has no attribute name"):

        class Wrong(ResponseSchema, source=Thing):
            name: str


def a_field() -> str:
    return ""


def test_a_field_that_hides_its_function_is_an_error():
    with pytest.raises(TypeError, match="a_field is read by something that is no function"):

        class Wrong(ResponseSchema, source=Thing):
            a_field: Annotated[str, From(a_field)] = Field(description="x")
