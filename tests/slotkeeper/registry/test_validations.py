"""Which results count as correct, and which results of a server are judged."""

import pytest

from slotkeeper.errors import NotFound
from slotkeeper.registry.validations import (
    LATEST,
    AnswerOutcome,
    ServerAnswers,
    Validation,
    Validations,
    find_difference,
)
from tests.support.builders import T0, at_once


@pytest.mark.parametrize(
    ("expected", "got", "compare", "differs"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, "subset", None),
        ({"a": 1}, {"a": 1, "b": 2}, "equal", "result has 'b', which is not expected"),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, "subset", "result.a has no 'b'"),
        ({"a": "*"}, {"a": [1, 2]}, "equal", None),
        ({"a": "*"}, {}, "subset", "result has no 'a'"),
        ([1, {"x": "y"}], [1, {"x": "z"}], "subset", "result.1.x differs"),
        ([1], [1, 2], "subset", "result has 2 values instead of 1"),
        (0.5, 0.52, "close", None),
        (0.5, 0.56, "close", "result differs"),
        (0.5, 0.52, "subset", "result differs"),
        (1, 1.0, "equal", None),
        (True, 1, "equal", "result differs"),
        ("a", None, "subset", "result differs"),
        ({"a": 1}, [1], "subset", "result differs"),
    ],
)
def test_a_result_matches_or_its_first_difference_is_returned(expected, got, compare, differs) -> None:
    assert find_difference(expected, got, compare, 0.05) == differs


@pytest.fixture
def validations(database) -> Validations:
    found = Validations(database)
    found.set(Validation("sum", "zimg", {"prompt": "2 + 2"}, {"answer": 4}, 60, changed_ms=T0))
    return found


def test_the_job_of_a_validation_is_claimed_by_one_process(validations) -> None:
    (due,) = validations.list_all()
    claims = at_once(*[lambda n=n: validations.claim(due, T0 + 60_000, f"j{n}", T0) for n in range(4)])
    assert sorted(claims) == [False, False, False, True]
    assert len(validations.list_awaited(10)) == 1


def test_a_validation_that_was_changed_in_the_meantime_is_not_claimed(validations) -> None:
    (due,) = validations.list_all()
    validations.set(Validation("sum", "zimg", {}, 5, 60, changed_ms=T0 + 1))
    assert not validations.claim(due, T0 + 60_000, "j", T0)
    validations.remove("sum")
    with pytest.raises(NotFound):
        validations.remove("sum")


def _answer(validations: Validations, job_id: str, outcome: AnswerOutcome, at_ms: int, server: str = "gpu") -> None:
    (due,) = validations.list_all()
    assert validations.claim(due, due.next_ms + 1, job_id, at_ms)
    assert validations.note(job_id, outcome, at_ms, server, "result differs" if outcome == "wrong" else None)


def test_the_latest_answers_of_each_server_count(validations) -> None:
    for n in range(LATEST + 5):
        _answer(validations, f"old{n:02}", AnswerOutcome.WRONG if n < 6 else AnswerOutcome.RIGHT, T0 + n)
    _answer(validations, "none", AnswerOutcome.NONE, T0 + 99, "other")
    gpu, other = validations.read_answers({})
    assert gpu == ServerAnswers("gpu", LATEST - 1, 1, 0, T0 + 5, "result differs")
    assert (other.none, other.judged) == (1, 0)
    assert validations.read_answers({"gpu": T0 + 20}, "gpu") == [ServerAnswers("gpu", 4, 0, 0)]
    assert not validations.note("none", AnswerOutcome.RIGHT, T0), "it was judged before"
    validations.delete_old(T0 + 50)
    assert [answers.server for answers in validations.read_answers({})] == ["other"]
