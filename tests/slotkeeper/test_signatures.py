"""Signed envelopes and proofs."""

import base64
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper import signatures
from slotkeeper.signatures import BadEnvelope, BadKey, RunStatement

_KEY = signatures.make_key()
_KEYS = {signatures.key_id(signatures.public_key_of(_KEY)): signatures.public_key_of(_KEY)}
_STATEMENT = RunStatement("job-1", 2, 1, "m", "v1", "n_1", "d", "aa", "bb", 1, 2)


def _envelope() -> dict[str, Any]:
    return signatures.sign_envelope(_STATEMENT.encode(), _KEY)


def test_an_envelope_is_verified_and_read_as_it_was_signed() -> None:
    verified = signatures.verify_envelope(_envelope(), _KEYS)

    assert RunStatement.decode(verified.statement) == _STATEMENT
    assert verified.key_id in _KEYS


def test_pae_equals_the_example_of_the_specification() -> None:
    assert (
        signatures.pre_authentication("http://example.com/HelloWorld", b"hello world")
        == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_an_envelope_of_another_type_is_refused() -> None:
    for kind in (signatures.HELLO_TYPE, "", None):
        with pytest.raises(BadEnvelope, match="type"):
            signatures.verify_envelope(_envelope() | {"payloadType": kind}, _KEYS)
    hello = {
        "payloadType": signatures.RUN_TYPE,
        "payload": signatures.encode_bytes(_STATEMENT.encode()),
        "signatures": [
            {
                "keyid": next(iter(_KEYS)),
                "sig": signatures.encode_bytes(
                    signatures.sign(_KEY, signatures.HELLO_TYPE, _STATEMENT.encode()),
                ),
            }
        ],
    }
    with pytest.raises(BadEnvelope, match="is wrong"):
        signatures.verify_envelope(hello, _KEYS)


@given(st.sampled_from(["payload", "sig"]), st.integers(min_value=0), st.integers(1, 255))
def test_an_envelope_with_a_changed_byte_is_refused(member: str, place: int, change: int) -> None:
    envelope = deepcopy(_envelope())
    holder = envelope if member == "payload" else envelope["signatures"][0]
    data = bytearray(base64.b64decode(holder[member]))
    data[place % len(data)] ^= change
    holder[member] = base64.b64encode(data).decode()

    with pytest.raises(BadEnvelope):
        signatures.verify_envelope(envelope, _KEYS)


@pytest.mark.parametrize(
    "change",
    [
        {"signatures": []},
        {"signatures": [{}, {}]},
        {"signatures": ["x"]},
        {"signatures": [{"keyid": 1, "sig": 2}]},
        {"signatures": [{"keyid": next(iter(_KEYS)), "sig": "!"}]},
        {"payload": "!"},
        {"payload": None},
        {"payload": base64.b64encode(bytes(17 << 10)).decode()},
    ],
)
def test_a_damaged_envelope_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadEnvelope):
        signatures.verify_envelope(_envelope() | change, _KEYS)
    for no_envelope in (None, [], "text"):
        with pytest.raises(BadEnvelope, match="no envelope"):
            signatures.verify_envelope(no_envelope, _KEYS)


def test_the_key_of_another_node_is_refused() -> None:
    other = signatures.public_key_of(signatures.make_key())

    with pytest.raises(BadEnvelope, match="none of the node's valid keys"):
        signatures.verify_envelope(_envelope(), {signatures.key_id(other): other})
    with pytest.raises(BadEnvelope, match="is wrong"):
        signatures.verify_envelope(_envelope(), dict.fromkeys(_KEYS, other))


@pytest.mark.parametrize("statement", [b"", b"[]", b"{}", _STATEMENT._replace(attempt=True).encode()])
def test_a_statement_that_is_none_about_a_run_is_refused(statement: bytes) -> None:
    with pytest.raises(BadEnvelope):
        RunStatement.decode(statement)


def test_joined_parts_cannot_be_divided_differently() -> None:
    assert signatures.join_parts("ab", "c") != signatures.join_parts("a", "bc")


def test_a_key_is_read_as_it_was_written_and_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(signatures.encode_key(_KEY))
    assert signatures.public_key_of(signatures.read_key(path)) == signatures.public_key_of(_KEY)
    path.write_bytes(b"none")
    with pytest.raises(BadKey, match="no private key"):
        signatures.read_key(path)
