from dataclasses import replace
from datetime import datetime

import pytest

from app import views
from app.paging import after, before
from insight.places import Place
from jobs.errors import InvalidJob
from jobs.states import State, Why
from routing.policies.placement import read_attributes
from tests.support.builders import T0


@pytest.mark.parametrize("at_ms", [0, 1, 999, T0, T0 + 1, 253_402_300_799_999])
def test_a_time_can_be_read_back_to_the_millisecond(at_ms):
    text = views.time(at_ms)
    assert text.endswith("Z")
    when = datetime.fromisoformat(text)
    assert int(when.timestamp()) * 1000 + when.microsecond // 1000 == at_ms


def test_no_time_is_null():
    assert views.time(None) is None


def test_a_cursor_comes_back_as_it_went():
    class Row:
        seq = 2**63 - 1

    assert before(after([Row()], 1)) == Row.seq
    assert after([Row()], 2) is None
    assert after([], 1) is None


@pytest.mark.parametrize("cursor", ["", "x", "s", "s0", "s-1", "s1 ", "12", "ü", "s" + "1" * 20])
def test_what_is_no_cursor_is_refused(cursor):
    with pytest.raises(InvalidJob) as refused:
        before(cursor)
    assert refused.value.field == "cursor"


@pytest.mark.parametrize("given", ["A100", 80.0, "fast,testnet"])
def test_an_attribute_is_shown_as_it_was_declared(given):
    shown = views.plain(given)
    assert read_attributes({"it": shown}) == {"it": given}


@pytest.mark.parametrize("state", sorted(State))
def test_every_state_has_an_outlook_or_needs_none(state):
    words = {views.outlook(state, place) for place in (Place(), Place(1), Place(offered=True))}
    expected = {State.QUEUED: {"unknown", "waiting", "starting"}, State.DELAYED: {"later"}}
    assert words == expected.get(state, {None})


def test_a_dead_job_that_crashed_and_one_that_was_retried_in_vain_have_codes_of_their_own(a_row):
    dead = replace(a_row, state=State.DEAD, error_code="boom", error_message="x")
    for why, code in ((Why.RETRIES_EXHAUSTED, "max_retries_exceeded"), (Why.CRASHES_EXHAUSTED, "max_crashes_exceeded")):
        assert views.error(replace(dead, why=why)) == {"code": code, "message": "x", "last_code": "boom"}
    assert views.error(replace(dead, state=State.FAILED, why=Why.INVALID_REQUEST))["code"] == "boom"
