from email.utils import formatdate

import pytest

from tasks.servers.responses import NOT_JSON, Response, id_text, parse_json, redact, retry_after_s

NOW_S = 1_700_000_000.0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        (" 0 ", 0.0),
        ("1.5", 1.5),
        ("99999999", 3600.0),
        (formatdate(NOW_S + 30, usegmt=True), 30.0),
        (formatdate(NOW_S - 30, usegmt=True), 0.0),
        (formatdate(NOW_S + 1e6, usegmt=True), 3600.0),
        (None, None),
        ("", None),
        ("-5", None),
        ("5, 10", None),
        ("1e9", None),
        ("٣", None),
        ("9" * 5000, None),
        ("soon", None),
        ("Fri, 99 Xyz 20", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_within_an_hour(header, seconds):
    assert retry_after_s(header, NOW_S) == seconds


@pytest.mark.parametrize("body", [b"", b"NaN", b'{"a": Infinity}', b"[1e999]", b"<html>", b"{", b"\xff", b"[" * 9000])
def test_what_is_not_json_is_not_json(body):
    assert parse_json(body) is NOT_JSON


def test_json_is_read_whatever_the_content_type_says():
    assert Response(200, {"Content-Type": "text/html"}, b'{"a": 1}').json == {"a": 1}
    assert Response(200, {}, b"null").json is None


@pytest.mark.parametrize(("value", "text"), [("a", "a"), (12, "12"), ("a/b c", "a/b c")])
def test_an_id_is_a_text_or_a_whole_number(value, text):
    assert id_text(value) == text


@pytest.mark.parametrize("value", [None, True, 1.5, [], {}, "", "..", ".", "a\nb", "\x00", "x" * 257])
def test_what_cannot_be_an_id_is_none(value):
    assert id_text(value) is None


def test_a_message_is_one_bounded_line_without_controls():
    assert redact("a\x00b\x1b[31m\u202e\r\nc\t d") == "ab[31m c d"
    assert len(redact("x" * 10_000)) == 500


def test_a_message_repeats_no_secret_not_even_half_of_one():
    secret = "k" * 40
    assert redact(f"bad key {secret}!", [secret]) == "bad key ***!"
    assert "kk" not in redact("x" * 480 + secret, [secret])
    assert "kk" not in redact(f"bad {secret[:20]}\x00{secret[20:]}", [secret])
