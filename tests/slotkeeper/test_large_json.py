"""Large JSON values are kept as text, and only the values at requested pointers are read."""

import json
import subprocess
import sys
from typing import Any

import orjson
import pytest

from slotkeeper import json_text, large_json
from slotkeeper.json_text import RawJson
from tasks.servers import pointers
from tools.cluster.stack import REPO

_FILL = "x" * large_json.LARGE_BYTES


def _large(value: Any) -> bytes:
    return orjson.dumps(value)


@pytest.mark.parametrize(
    ("value", "pointer", "found"),
    [
        ({"fill": _FILL, "status": "success"}, "/status", "success"),
        ({"fill": _FILL, "a": {"b": [1, {"c": None}]}}, "/a/b/1/c", None),
        ({"fill": _FILL, "a": 1}, "/b", pointers.MISSING),
        ({"fill": _FILL, "a": 1}, "/a/b", pointers.MISSING),
        ([_FILL, "one", 2], "/1", "one"),
        ([_FILL, "one", 2], "/3", pointers.MISSING),
        ([_FILL, "one", 2], "/01", pointers.MISSING),
        ([_FILL, *range(98), "last"], "/99", "last"),
        ({"fill": _FILL, "a/b~c": True}, "/a~1b~0c", True),
        ({"fill": _FILL, "ü": "ö"}, "/ü", "ö"),
        ({"": _FILL, "n": 12345678901234567890123}, "/n", 12345678901234567890123),
    ],
)
def test_a_pointer_finds_the_same_value_in_a_large_text_as_in_its_parsed_objects(
    value: Any, pointer: str, found: Any
) -> None:
    text = json.dumps(value, ensure_ascii=False).encode()
    parsed = large_json.parse(text)
    assert isinstance(parsed, RawJson)
    at = pointers.parse(pointer)
    assert pointers.resolve(parsed, at) == found
    reported = large_json.apply_report(text, large_json.report_pointers(text, [at]))
    assert pointers.resolve(reported, at) == found


def test_a_large_part_of_a_large_text_is_kept_unchanged() -> None:
    text = b'{"result": {"b":"' + _FILL.encode() + b'", "n": 1.10}, "status": 1}'
    for parsed in (
        large_json.parse(text),
        large_json.apply_report(text, large_json.report_pointers(text, [("result",)])),
    ):
        part = pointers.resolve(parsed, ("result",))
        assert isinstance(part, RawJson)
        assert json_text.dumps(part) == b'{"b":"' + _FILL.encode() + b'", "n": 1.10}'


def test_the_last_of_two_members_of_one_name_counts_in_a_large_text_as_in_a_small_text() -> None:
    text = b'{"fill":"' + _FILL.encode() + b'","at":1,"at":2}'
    assert pointers.resolve(large_json.parse(text), ("at",)) == json_text.loads(b'{"at":1,"at":2}')["at"]


@pytest.mark.parametrize(
    "end",
    [b"", b"]", b"}}", b'"\xff"}', b"NaN}", b"01}", b'"\\ud8"}', b'"\\ud800"}', b'"a\nb"}', b"1,}", b"[" * 100_000],
)
def test_a_large_text_that_is_no_json_is_refused(end: bytes) -> None:
    with pytest.raises(ValueError):
        large_json.parse(b'{"fill":"' + _FILL.encode() + b'","at":' + end)


def _elsewhere(text: bytes, pointer: list[str]) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-P", "-m", "slotkeeper.large_json", json.dumps([pointer])]
    return subprocess.run(command, input=text, capture_output=True, cwd=REPO, timeout=60)


def test_a_separate_process_reports_the_values_at_pointers_and_exits_with_1_for_invalid_json() -> None:
    text = b'{"status":"success","result":[' + b"[]," * 2_000_000 + b"[]]}"
    ended = _elsewhere(text, ["status"])
    assert ended.returncode == 0, ended.stderr
    assert pointers.resolve(large_json.apply_report(text, ended.stdout), ("status",)) == "success"
    assert _elsewhere(text[:-1], ["status"]).returncode == 1
