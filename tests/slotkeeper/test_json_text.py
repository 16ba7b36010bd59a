import json

import pytest

from slotkeeper import json_text

NUMBERS = [0, -1, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 2**70, 10**300, 10**4299]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_whole_number_survives_a_json_round_trip(number):
    text = json.dumps({"a": [number]}, separators=(",", ":")).encode()
    assert json_text.dumps(json_text.loads(text)) == text
    assert json_text.dumps({"a": [number]}) == text
    assert json_text.loads(text) == {"a": [number]}


@pytest.mark.parametrize("text", ["1" * 4301, "-" + "9" * 4301, "7" * 2_000_000])
def test_an_integer_of_more_than_4300_digits_is_refused_with_what_to_do(text):
    with pytest.raises(ValueError, match="more than 4,300 digits; send it as a text"):
        json_text.loads(f'{{"a":[{text}]}}')


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", ",", "{", "[" * 100_000, '"\xff'])
@pytest.mark.parametrize("before", ["", "1" * 30 + ","])
def test_invalid_json_is_refused(text, before):
    with pytest.raises(ValueError):
        json_text.loads(f"[{before}{text}]")


def test_digits_in_a_text_change_nothing():
    text = '{"card":"12345678901234567890","n":1.5}'
    assert json_text.loads(text) == {"card": "12345678901234567890", "n": 1.5}


def test_a_value_without_a_json_form_raises_a_type_error():
    with pytest.raises(TypeError):
        json_text.dumps({"a": object(), "n": 2**70})
