"""The offline check of a signed result."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from app.cli.__main__ import main
from slotkeeper import signatures
from slotkeeper.signatures import RunStatement

_KEY = signatures.make_key()
_PUBLIC = signatures.public_key_of(_KEY)
_PAYLOAD, _RESULT = '{"prompt":"a cat"}', '{"image": 1E2}'


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _bundle() -> dict[str, Any]:
    statement = RunStatement("j1", 1, 1, "zimg", "", "n_1", "d", _sha256(_PAYLOAD), _sha256(_RESULT), 1, 2)
    return {
        "job_id": "j1",
        "envelope": signatures.sign_envelope(statement.encode(), _KEY),
        "key_id": signatures.key_id(_PUBLIC),
        "public_key": signatures.encode_bytes(_PUBLIC),
        "payload": _PAYLOAD,
        "result": _RESULT,
    }


def _verify(folder: Path, bundle: Any, keys: dict[str, str] | None = None) -> Result:
    (folder / "b.json").write_text(json.dumps(bundle))
    words = ["verify", str(folder / "b.json")]
    if keys is not None:
        (folder / "keys.json").write_text(json.dumps(keys))
        words += ["--keys", str(folder / "keys.json")]
    return CliRunner().invoke(main, words)


def test_a_valid_result_is_shown_with_what_was_signed(tmp_path: Path) -> None:
    done = _verify(tmp_path, _bundle())
    assert done.exit_code == 0 and "n_1" in done.output and "key that came with the file" in done.output
    assert _verify(tmp_path, _bundle(), {signatures.key_id(_PUBLIC): signatures.encode_bytes(_PUBLIC)}).exit_code == 0


@pytest.mark.parametrize(
    "change",
    [
        {"result": '{"image": 100.0}'},
        {"payload": "{}"},
        {"public_key": signatures.encode_bytes(signatures.public_key_of(signatures.make_key()))},
        {"public_key": None},
        {"envelope": {}},
    ],
)
def test_a_changed_bundle_is_not_valid(tmp_path: Path, change: dict[str, Any]) -> None:
    done = _verify(tmp_path, _bundle() | change)
    assert done.exit_code == 1 and "Not valid" in done.output


def test_a_key_that_is_not_trusted_is_not_valid(tmp_path: Path) -> None:
    assert _verify(tmp_path, _bundle(), {}).exit_code == 1


def test_a_payload_that_is_not_in_the_file_is_not_checked(tmp_path: Path) -> None:
    done = _verify(tmp_path, _bundle() | {"payload": None})
    assert done.exit_code == 0 and "was not checked" in done.output


@pytest.mark.parametrize("bundle", [[], {}, {"key_id": "x", "public_key": "!"}])
def test_a_file_that_is_no_bundle_is_unreadable(tmp_path: Path, bundle: Any) -> None:
    assert _verify(tmp_path, bundle).exit_code == 2
