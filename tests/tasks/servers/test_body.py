"""A large answer's body goes to a file, and stays in memory where no file can be written."""

import tempfile
from typing import Any

import pytest

from slotkeeper import large_json
from tasks.servers.http_client import SPOOL_AFTER_BYTES, ResponseBody

_PIECE = bytes(range(256)) * 256


def _filled(size: int) -> ResponseBody:
    body = ResponseBody()
    while body.size < size:
        body.add(_PIECE)
    return body


def test_a_small_body_stays_in_memory() -> None:
    assert _filled(SPOOL_AFTER_BYTES).whole() == (_PIECE * (SPOOL_AFTER_BYTES // len(_PIECE)), None)


def test_of_a_large_body_only_the_beginning_stays_in_memory() -> None:
    beginning, file = _filled(3 * SPOOL_AFTER_BYTES).whole()
    assert file is not None and file.size == 3 * SPOOL_AFTER_BYTES
    assert len(beginning) < SPOOL_AFTER_BYTES and beginning == file.read(0, len(beginning))
    assert file.read(0, file.size) == _PIECE * (file.size // len(_PIECE))


@pytest.mark.parametrize("fails_at", [0, 1, 7])
def test_on_a_full_disk_a_large_body_stays_in_memory(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    written = []
    write = large_json.os.pwrite

    def full(fd: int, piece: Any, at: int) -> int:
        written.append(at)
        if len(written) > fails_at:
            write(fd, piece[:10], at)
            raise OSError(28, "No space left on device")
        return write(fd, piece, at)

    monkeypatch.setattr(large_json.os, "pwrite", full)
    body, file = _filled(3 * SPOOL_AFTER_BYTES).whole()
    assert file is None and body == _PIECE * (3 * SPOOL_AFTER_BYTES // len(_PIECE))


def test_where_no_file_can_be_made_a_large_body_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    body, file = _filled(2 * SPOOL_AFTER_BYTES).whole()
    assert file is None and body == _PIECE * (2 * SPOOL_AFTER_BYTES // len(_PIECE))
