"""The decompression of messages is bounded, whatever compressed them."""

import bz2
import lzma
import tracemalloc
import zlib
from collections.abc import Iterator

import pytest
from celery.worker.control import Panel
from kombu import compression
from kombu.message import Message
from kombu.utils import json

from slotkeeper.registry.model_config import MAX_PAYLOAD_BYTES, ModelConfig
from tasks.extensions import control, transport

MAX_BYTES = transport.MAX_DECOMPRESSED_BYTES
COMPRESSORS = {
    "application/x-gzip": zlib.compress,
    "application/x-bz2": bz2.compress,
    "application/x-lzma": lzma.compress,
}


@pytest.fixture(autouse=True)
def limited_decompression(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the limit to 1,000 bytes, and register a format that has no bounded decompressor."""
    monkeypatch.setattr(compression, "_decoders", dict(compression._decoders))  # type: ignore[attr-defined]
    monkeypatch.setattr(compression, "_aliases", dict(compression._aliases))  # type: ignore[attr-defined]
    monkeypatch.setattr(transport, "MAX_DECOMPRESSED_BYTES", 1000)
    compression.register(lambda text: text, lambda text: text * 1_000_000, "application/x-other", aliases=["other"])
    transport.limit_decompression()
    yield


def _decode(body: bytes, content_type: str) -> object:
    """Decode a compressed message as kombu's consumer does."""
    message = Message(
        body,
        headers={"compression": content_type},
        content_type="application/json",
        content_encoding="utf-8",
        accept={"application/json"},
    )
    if message.errors:
        raise message.errors[0][1]
    return message.decode()


@pytest.mark.parametrize("content_type", COMPRESSORS)
def test_a_message_within_the_size_limit_is_decompressed(content_type: str) -> None:
    assert _decode(COMPRESSORS[content_type](b'["%s"]' % (b"a" * 996)), content_type) == ["a" * 996]


def test_the_largest_payload_that_a_model_may_accept_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_DECOMPRESSED_BYTES", MAX_BYTES)
    payload = b'{"text":"%s"}' % (b"a" * (MAX_PAYLOAD_BYTES - len('{"text":""}')))
    ModelConfig(max_payload_bytes=len(payload))
    args = b'[["zimg",%s],{},{}]' % payload
    content_type = "application/x-gzip"
    assert _decode(COMPRESSORS[content_type](args), content_type) is not None


@pytest.mark.parametrize("character", ["a", "ж", "語", "🙂"])
def test_the_largest_payload_fits_in_every_script(character: str) -> None:
    """The limit of a model counts bytes of UTF-8; in a message, kombu writes ASCII."""
    text = character * 10_000
    growth = len(json.dumps(text)) / len(f'"{text}"'.encode())
    assert growth * MAX_PAYLOAD_BYTES + 100_000 < MAX_BYTES, "with its headers"


@pytest.mark.parametrize("content_type", COMPRESSORS)
def test_a_message_over_the_size_limit_is_refused_and_never_decompressed_completely(content_type: str) -> None:
    body = COMPRESSORS[content_type](b" " * 50_000_000 + b"[]")
    tracemalloc.start()
    try:
        with pytest.raises(transport.DecompressedTooLarge):
            _decode(body, content_type)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000, "bytes were allocated at once"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content_type", ["application/x-other", "other"])
def test_a_decompressor_without_a_bound_is_refused(content_type: str) -> None:
    with pytest.raises(transport.DecompressedTooLarge):
        _decode(b"[]", content_type)


@pytest.mark.parametrize("command", ["cancel_consumer", "add_consumer"])
def test_a_workers_queues_are_not_for_the_broker_to_say(command: str) -> None:
    """Celery's own command would fail here, because its state is None."""
    assert Panel.data[command](None, queue="maintenance") == {"ok": control._UNCHANGED}
