"""What follows from the catalog is found out once, and anew when that has changed."""

from types import SimpleNamespace
from typing import Any

import pytest

from tasks.ways import Ways


@pytest.fixture
def catalog() -> Any:
    found = SimpleNamespace(now="first")
    found.known = lambda: found.now
    return found


def test_what_is_alike_is_found_out_once_for_each_catalog(catalog: Any) -> None:
    asked: list[Any] = []

    def find(*of: Any) -> str:
        asked.append(of)
        return "-".join(of)

    ways = Ways(catalog)
    assert [ways.find(find, model) for model in ("a", "b", "a")] == ["first-a", "first-b", "first-a"]
    catalog.now = "second"
    assert ways.find(find, "a") == "second-a"
    assert asked == [("first", "a"), ("first", "b"), ("second", "a")]


def test_what_was_not_found_out_is_asked_for_again(catalog: Any) -> None:
    answers: list[Any] = [KeyError("a"), "here"]

    def find(*_: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    ways = Ways(catalog)
    with pytest.raises(KeyError):
        ways.find(find)
    assert ways.find(find) == "here"
