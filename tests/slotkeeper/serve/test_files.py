"""A function may return bytes, an image or a file: each is encoded as one form of JSON."""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from slotkeeper.serve import ReferenceServer, ServeConfig

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


class Image:
    """What is used of an image of PIL."""

    mode = "RGB"

    def __init__(self, made_as: str | None) -> None:
        self.format = made_as

    def save(self, file: Any, format: str) -> None:
        file.write({"PNG": PNG, "JPEG": b"\xff\xd8\xff\xe0"}[format])


def answer_of(returned: Callable[[], Any], **config: Any) -> requests.Response:
    with ReferenceServer(lambda payload: returned(), ServeConfig(port=0, **config)) as server:
        return requests.post(f"{server.url}/generate", json={}, timeout=10)


def result_of(returned: Callable[[], Any]) -> Any:
    answer = answer_of(returned)
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]


def form(content: bytes, media_type: str, **more: str) -> dict[str, Any]:
    return {"media_type": media_type, "size": len(content), "base64": base64.b64encode(content).decode(), **more}


@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0..", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF....WEBPVP8 ", "image/webp"),
        (b"RIFF....WAVEfmt ", "audio/wav"),
        (b"glTF\x02", "model/gltf-binary"),
        (b"....ftypisom", "video/mp4"),
        (b"", "application/octet-stream"),
        (b"\x00\xff", "application/octet-stream"),
    ],
)
def test_bytes_travel_with_their_kind_and_size(content: bytes, media_type: str) -> None:
    assert result_of(lambda: content) == form(content, media_type)
    assert result_of(lambda: bytearray(content)) == form(content, media_type)


@pytest.mark.parametrize(("made_as", "media_type"), [(None, "image/png"), ("PNG", "image/png"), ("JPEG", "image/jpeg")])
def test_an_image_keeps_its_format_and_an_image_without_one_becomes_png(made_as: str | None, media_type: str) -> None:
    assert result_of(lambda: Image(made_as))["media_type"] == media_type


def test_an_image_of_pil_is_one() -> None:
    made = pytest.importorskip("PIL.Image", reason="Pillow is not installed").new("RGB", (2, 2))
    assert base64.b64decode(result_of(lambda: made)["base64"]).startswith(PNG[:8])


def test_a_file_travels_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(PNG)
    (tmp_path / "notes.txt").write_text("h\u00e9llo", "utf-8")
    assert result_of(lambda: path) == result_of(lambda: path.open("rb")) == form(PNG, "image/png", name="cat.png")
    assert result_of(lambda: (tmp_path / "notes.txt").open()) == form(
        "h\u00e9llo".encode(), "text/plain", name="notes.txt"
    )


def test_a_buffer_is_read_from_its_beginning() -> None:
    buffer = io.BytesIO()
    buffer.write(PNG)
    assert result_of(lambda: buffer) == form(PNG, "image/png")


def test_files_at_any_place_of_a_result_are_encoded() -> None:
    one = form(PNG, "image/png")
    assert result_of(lambda: {"seed": 7, "images": [PNG, PNG], "n": 2**80}) == {
        "seed": 7,
        "images": [one, one],
        "n": 2**80,
    }


@pytest.mark.parametrize("value", [{1, 2}, {(1,): 2}, "\ud800", object()])
def test_a_result_without_a_json_form_is_a_final_error_at_the_first_attempt(value: Any) -> None:
    answer = answer_of(lambda: value)
    assert (answer.status_code, answer.json()["retryable"]) == (422, False)
    assert "return JSON values, bytes, an image or a file" in answer.json()["error"]


def test_a_file_that_cannot_be_read_now_may_be_tried_again(tmp_path: Path) -> None:
    answer = answer_of(lambda: tmp_path / "missing.png")
    assert (answer.status_code, answer.json()["retryable"]) == (500, True)


def test_a_type_error_of_the_function_itself_may_be_tried_again() -> None:
    answer = answer_of(lambda: len(5))  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["retryable"]) == (500, True)
