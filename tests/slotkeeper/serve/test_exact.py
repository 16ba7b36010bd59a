"""The reference server reads and writes JSON exactly, and its logged errors contain no payload."""

import logging

import pytest
import requests

from slotkeeper.serve.exact import NotJsonSerializable, dumps, loads
from slotkeeper.serve.server import ReferenceServer, ServeConfig


@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 2**64, -(2**63) - 1, 7**1000])
def test_whole_numbers_are_the_same_both_ways(number: int) -> None:
    text = b'{"a":[{"b":%d}]}' % number
    assert loads(text) == {"a": [{"b": number}]}
    assert dumps(loads(text)) == text
    assert dumps(("x", [number], True)) == b'["x",[%d],true]' % number


@pytest.mark.parametrize("text", [b"[1234567890123456789, NaN]", b"[1234567890123456789, 1e999]", b"7" * 5000, b"{"])
def test_a_number_that_python_cannot_represent_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        loads(text)


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, {(1,): 2**70}])
def test_a_value_without_a_json_form_raises_not_json_serializable(value: object) -> None:
    with pytest.raises(NotJsonSerializable, match="return JSON values, bytes, an image or a file"):
        dumps(value)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_function_receives_and_returns_long_integers(asynchronous: bool) -> None:
    text = f'{{"n":{2**80}}}'
    headers = {"Content-Type": "application/json"}
    with ReferenceServer(lambda payload: payload, ServeConfig(port=0, asynchronous=asynchronous)) as server:
        answer = requests.post(f"{server.url}/generate", data=text, headers=headers, timeout=10)
        if asynchronous:
            run = server.engine.find(answer.json()["job_id"])
            assert run is not None and run.done.wait(10)
            answer = requests.get(f"{server.url}/status/{run.id}", timeout=10)
    assert f'"result":{text}' in answer.text


@pytest.mark.parametrize("level, is_logged", [("WARNING", False), ("DEBUG", True)])
def test_the_text_of_an_error_is_logged_only_at_level_debug(
    caplog: pytest.LogCaptureFixture, level: str, is_logged: bool
) -> None:
    def model(payload: dict[str, str]) -> None:
        raise RuntimeError(payload["prompt"])

    caplog.set_level(getattr(logging, level), "slotkeeper.serve")
    with ReferenceServer(model, ServeConfig(port=0)) as server:
        requests.post(f"{server.url}/generate", json={"prompt": "a\x1b]52;secret"}, timeout=10)
    logged = "\n".join(logging.Formatter().format(record) for record in caplog.records)
    assert "failed: RuntimeError in model (" in logged
    assert ("secret" in logged) is is_logged
    assert is_logged or "\n" not in logged
