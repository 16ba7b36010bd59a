import json
import time

import pytest

from slotkeeper import json_text

NUMBERS = [0, -1, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 2**70, 10**300]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_whole_number_comes_back_as_it_went(number):
    text = json.dumps({"a": [number]}, separators=(",", ":")).encode()
    assert json_text.dumps(json_text.loads(text)) == text
    assert json_text.dumps({"a": [number]}) == text
    assert json_text.plain(text.decode()) == json_text.unwritten(json_text.loads(text)) == {"a": [number]}


def test_numbers_within_64_bits_are_pythons_own():
    for number in (2**63 - 1, -(2**63), 2**64 - 1):
        assert json_text.loads(str(number)) == number
    assert json_text.digits(json_text.loads(str(2**64))) == str(2**64)
    assert json_text.digits(2**64 - 1) is None


@pytest.mark.parametrize("text", ["1" * 100_000, "[" + "1" * 5000 + "]", "-" + "9" * 4301])
def test_there_is_no_longest_number(text):
    assert json_text.dumps(json_text.loads(text)).decode() == text
    json.dumps(json_text.plain(text))


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", ",", "{", "[" * 100_000, '"\xff'])
@pytest.mark.parametrize("before", ["", "1" * 30 + ","])
def test_what_is_not_json_is_refused(text, before):
    with pytest.raises(ValueError):
        json_text.loads(f"[{before}{text}]")


def test_digits_in_a_text_change_nothing():
    text = '{"card":"12345678901234567890","n":1.5}'
    assert json_text.loads(text) == {"card": "12345678901234567890", "n": 1.5}


def test_what_can_be_no_json_is_not_written():
    with pytest.raises(TypeError):
        json_text.dumps({"a": object(), "n": 2**70})


def test_a_number_costs_what_its_length_is():
    """Read as an int this one would take minutes."""
    began = time.process_time()
    json_text.dumps(json_text.loads("7" * 2_000_000))
    assert time.process_time() - began < 1
