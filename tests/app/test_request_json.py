import math

import pytest

from app.problems import ProblemError
from app.request_json import _first_duplicate, iter_array, parse_json
from slotkeeper import json_text


@pytest.mark.parametrize(
    "text, value",
    [(b'{"a":[1,2.5,null,true,"\xc3\xbc"]}', {"a": [1, 2.5, None, True, "ü"]}), (b" 7 ", 7), (b'"x"', "x")],
)
def test_json_is_read(text, value):
    assert parse_json(text) == value


@pytest.mark.parametrize("text", [b"18446744073709551617", b"9" * 4300])
def test_integers_keep_all_their_digits(text):
    assert json_text.dumps(parse_json(text)) == text


def test_a_number_that_overflows_is_parsed_as_infinity():
    assert math.isinf(parse_json(b"1e999"))


@pytest.mark.parametrize(
    "text, message_part",
    [
        (b"", "line 1, column 1"),
        (b'{"a":1,}', "line 1"),
        (b"{'a':1}", "line 1"),
        (b"[1] [2]", "line 1"),
        (b'{"a":1,\n"a":2}', "the key 'a' appears twice"),
        (b'[{"b":{"a":1,"a":1}}]', "the key 'a' appears twice"),
        (b'{"\\ud800":1,"\\ud800":1}', "appears twice"),
        (b"NaN", "NaN is no JSON"),
        (b"[-Infinity]", "-Infinity is no JSON"),
        (b'"\xff"', "byte 1 is no UTF-8"),
        (b"\xff\xfe[\x00]\x00", "no UTF-8"),
        (b"\xef\xbb\xbf{}", "line 1"),
        (b'"a\nb"', "line 1"),
        (b"[" * 1_000_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_the_error_for_invalid_json_names_the_position(text, message_part):
    with pytest.raises(ProblemError) as refused:
        parse_json(text, index=3)
    assert (refused.value.status, refused.value.code) == (400, "malformed_json")
    assert message_part in refused.value.detail
    assert refused.value.facts == {"index": 3}


@pytest.mark.parametrize(
    "text, values",
    [
        (b" [ ] ", []),
        (b"[1]", [1]),
        (b'\n[ {"a":[1,{}]} ,\t"]", [2], null ]\n', [{"a": [1, {}]}, "]", [2], None]),
        (b"[18446744073709551616]", [18446744073709551616]),
    ],
)
def test_an_array_is_read_value_by_value(text, values):
    assert list(iter_array(text, 100)) == values
    assert list(iter_array(text + b" " * 200, 100)) == values


@pytest.mark.parametrize(
    "text, message_part, facts",
    [
        (b"[", "line 1, column 2", {"index": 0}),
        (b"[1,]", "line 1, column 4", {"index": 1}),
        (b"[1\n2]", "line 2, column 1", {"index": 0}),
        (b"[1]]", "Extra data", {"index": 0}),
        (b"[]x", "Extra data", {}),
        (b'[1,{"a":1,"a":2}]', "the key 'a' appears twice", {"index": 1}),
        (b"[1,NaN]", "NaN is no JSON", {"index": 1}),
        (b'["\xff"]', "no UTF-8", {}),
        (b"[" * 100_000, "nested too deeply", {"index": 0}),
        (b'[1,"' + b"a" * 99 + b'"]', "longer than 100 characters", {"index": 1}),
    ],
)
def test_the_error_for_an_invalid_array_names_the_element(text, message_part, facts):
    with pytest.raises(ProblemError) as refused:
        list(iter_array(text, 100_000 if b"[[" in text else 100))
    assert (refused.value.status, refused.value.code, refused.value.facts) == (400, "malformed_json", facts)
    assert message_part in refused.value.detail


def test_an_array_is_parsed_only_up_to_the_requested_items():
    found = iter_array(b"[1," + b"0," * 1_000_000, 100)
    assert [next(found) for _ in range(3)] == [1, 0, 0]


def test_a_duplicate_key_is_found_with_linear_comparisons():
    class Counted(str):
        looks = 0

        def __eq__(self, other):
            Counted.looks += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = [Counted(f"k{n}") for n in range(1000)]
    assert _first_duplicate([(name, 0) for name in [*names, Counted("k999")]]) == "k999"
    assert Counted.looks <= 2 * len(names)
