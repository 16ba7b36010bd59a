import pytest

from slotkeeper.json_fault import describe_fault


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        (b'{"score": NaN}', "NaN at character 11 is not a JSON value: send null or a text in its place"),
        (b"[1, -Infinity]", "-Infinity at character 5 is not a JSON value: send null or a text in its place"),
        (b'{"\xc3\xa9": nan}', "nan at character 7 is not a JSON value: send null or a text in its place"),
        (b"[1e999]", "the number 1e999 at character 2 is beyond the range of a double"),
        (
            rb'["\ud83d\ude00", "a \ud83d"]',
            r"\ud83d at character 21 is one half of a surrogate pair: the other is missing",
        ),
        (rb'["\\\udc00"]', r"\udc00 at character 5 is one half of a surrogate pair: the other is missing"),
        (b"\xef\xbb\xbf{}", "it begins with a byte order mark (EF BB BF), which JSON does not allow"),
        (b'{"a": "\xe9"}', "byte E9 at position 8 is not UTF-8"),
        (b"", "it is empty"),
        (b" \r\n", "it is empty"),
        (b"<html><title> Log in </title>", "it is an HTML or XML page ('Log in')"),
        (b"<?xml version='1.0'?><a/>", "it is an HTML or XML page"),
        (b"<title lang='en'>\n Bad\n  Gateway </title>", "it is an HTML or XML page ('Bad Gateway')"),
        (b"<title> </title>", "it is an HTML or XML page"),
        (b"<p>" + b" " * 3000 + b"<title>Log in</title>", "it is an HTML or XML page"),
        (b'{"a": 1', "it ends at character 7, before its JSON is complete"),
        (b'{"a": 1} x', "unexpected content after document at character 10"),
    ],
)
def test_the_first_fault_is_described_with_its_position(text, clause):
    assert describe_fault(text) == clause


def test_json_has_no_fault():
    assert describe_fault(b' {"a": [1.5, "\\ud83d\\ude00"]} ') == ""


def test_a_long_number_is_shortened():
    assert len(describe_fault(b"[1" + b"0" * 1000 + b"e999]")) < 100


def test_an_integer_with_too_many_digits_is_described_with_its_position_and_the_remedy():
    message = describe_fault(b'{"n":' + b"7" * 4301 + b"}")
    assert message == "a whole number has more than 4,300 digits; send it as a text (character 6)"


def test_an_integer_beyond_doubles_is_no_fault():
    assert describe_fault(b'{"n":' + b"7" * 4300 + b"}") == ""
    assert describe_fault(b'{"n":' + b"7" * 4300 + b",}").endswith("at character 4306")
