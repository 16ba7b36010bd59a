"""A message is unpacked up to a bound, whatever packed it."""

import bz2
import lzma
import zlib
from collections.abc import Iterator

import pytest
from celery.worker.control import Panel
from kombu import compression
from kombu.message import Message
from kombu.utils import json

from slotkeeper.registry.model_config import MAX_PAYLOAD_BYTES, ModelConfig
from tasks.extensions import control, transport

MOST_BYTES = transport.MAX_DECOMPRESSED_BYTES
PACKERS = {"application/x-gzip": zlib.compress, "application/x-bz2": bz2.compress, "application/x-lzma": lzma.compress}


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compression, "_decoders", dict(compression._decoders))  # type: ignore[attr-defined]
    monkeypatch.setattr(compression, "_aliases", dict(compression._aliases))  # type: ignore[attr-defined]
    monkeypatch.setattr(transport, "MAX_DECOMPRESSED_BYTES", 1000)
    compression.register(lambda text: text, lambda text: text * 1_000_000, "application/x-other", aliases=["other"])
    transport.limit_decompression()
    yield


def _read(body: bytes, how: str) -> object:
    """As kombu's consumer does."""
    message = Message(
        body,
        headers={"compression": how},
        content_type="application/json",
        content_encoding="utf-8",
        accept={"application/json"},
    )
    if message.errors:
        raise message.errors[0][1]
    return message.decode()


@pytest.mark.parametrize("how", PACKERS)
def test_what_fits_is_unpacked(how: str) -> None:
    assert _read(PACKERS[how](b'["%s"]' % (b"a" * 996)), how) == ["a" * 996]


def test_the_largest_payload_that_a_model_may_take_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_DECOMPRESSED_BYTES", MOST_BYTES)
    payload = b'{"text":"%s"}' % (b"a" * (MAX_PAYLOAD_BYTES - len('{"text":""}')))
    ModelConfig(max_payload_bytes=len(payload))
    args = b'[["zimg",%s],{},{}]' % payload
    how = "application/x-gzip"
    assert _read(PACKERS[how](args), how) is not None


@pytest.mark.parametrize("letter", ["a", "ж", "語", "🙂"])
def test_it_fits_whatever_it_is_written_in(letter: str) -> None:
    """A model's bound is of UTF-8; in a message, kombu writes ASCII."""
    text = letter * 10_000
    growth = len(json.dumps(text)) / len(f'"{text}"'.encode())
    assert growth * MAX_PAYLOAD_BYTES + 100_000 < MOST_BYTES, "with its headers"


@pytest.mark.parametrize("how", PACKERS)
def test_what_does_not_is_refused_and_never_whole(how: str) -> None:
    with pytest.raises(transport.DecompressedTooLarge):
        _read(PACKERS[how](b" " * 50_000_000 + b"[]"), how)


@pytest.mark.parametrize("how", ["application/x-other", "other"])
def test_what_knows_no_bound_is_refused(how: str) -> None:
    with pytest.raises(transport.DecompressedTooLarge):
        _read(b"[]", how)


@pytest.mark.parametrize("command", ["cancel_consumer", "add_consumer"])
def test_a_workers_queues_are_not_for_the_broker_to_say(command: str) -> None:
    """What Celery's own would do, it would do to this, which is nothing."""
    assert Panel.data[command](None, queue="maintenance") == {"ok": control._UNCHANGED}
