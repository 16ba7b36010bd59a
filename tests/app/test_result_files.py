"""Files in results: found, drawn or offered by the page, and saved by the command line."""

import base64
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner
from pytest_httpserver import HTTPServer

from app.cli.__main__ import main
from app.result_files import MOST_FILES, files_in, shortened
from slotkeeper.jobs.states import Reason
from tests.support.api import Api
from tests.support.ends import end_run_with
from tests.support.visitor import key_of, visitor
from tools.cluster.direct_starts import begin_run

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
TEXT = base64.b64encode(PNG).decode()
FILE = {"media_type": "image/png", "size": len(PNG), "base64": TEXT}
URL = f"data:image/png;base64,{TEXT}"
KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])


# -- in a result -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "places"),
    [
        (FILE, [""]),
        (URL, [""]),
        ({"seed": 1, "images": [FILE, URL]}, ["/images/0", "/images/1"]),
        ({"a/b": {"~": FILE}}, ["/a~1b/~0"]),
        ({"media_type": "image/png"}, []),
        ({"media_type": 5, "base64": TEXT}, []),
        ("data:image/png,x", []),
        ("text;base64,", []),
        (None, []),
        (7, []),
    ],
)
def test_a_file_is_an_object_of_its_kind_and_text_or_a_data_url(result: Any, places: list[str]) -> None:
    found = files_in(result)
    assert [file.place for file in found] == places
    assert all((file.content(), file.size, file.media_type) == (PNG, len(PNG), "image/png") for file in found)
    if places:
        assert TEXT not in orjson.dumps(shortened(orjson.loads(orjson.dumps(result)))).decode()


def test_only_a_bounded_part_of_a_large_result_is_searched_for_files() -> None:
    assert len(files_in([FILE] * 1000)) == MOST_FILES
    assert files_in([[]] * 100_000 + [FILE]) == []


# -- on the page -------------------------------------------------------------------------------------------------------


def completed(api: Api, result: Any, **fields: Any) -> str:
    """Complete a job with this result and return its id."""
    if "headers" not in fields:
        api.register()
    job_id = api.submitted(**fields)
    offer = next(offer for offer in api.notifications.offers if offer.job_id == job_id)
    task = begin_run(api.dispatcher, offer, "a-worker")
    assert task is not None
    end_run_with(api.dispatcher, task, Reason.FINISHED, result=orjson.dumps(result).decode())
    return job_id


def test_the_page_draws_the_pictures_of_a_result_and_not_their_text(api: Api) -> None:
    job = completed(api, {"images": [FILE, URL]})
    shown = visitor(api).get(f"/page/jobs/{job}").text
    for number in (0, 1):
        assert f'<img src="/page/jobs/{job}/files/{number}"' in shown
        answer = visitor(api).get(f"/page/jobs/{job}/files/{number}")
        assert (answer.data, answer.content_type) == (PNG, "image/png")
        assert answer.headers["Content-Disposition"].startswith("inline")
        assert "img-src" not in answer.headers["Content-Security-Policy"]
    assert TEXT not in shown
    assert f"({len(PNG)} bytes)" in shown


@pytest.mark.parametrize("media_type", ["image/svg+xml", "text/html", "application/pdf", "text/javascript"])
def test_a_file_that_a_browser_could_execute_is_only_offered_as_a_download(api: Api, media_type: str) -> None:
    job = completed(api, FILE | {"media_type": media_type, "name": '../a"b\r\nc.html'})
    assert "<img" not in visitor(api).get(f"/page/jobs/{job}").text
    answer = visitor(api).get(f"/page/jobs/{job}/files/0")
    assert answer.content_type == "application/octet-stream"
    assert answer.headers["Content-Disposition"] == "attachment; filename=_a_b__c.html"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_a_file_that_is_not_there_or_no_base64_is_not_found(api: Api) -> None:
    job = completed(api, {"media_type": "image/png", "base64": "!"})
    for number in (0, 1):
        assert visitor(api).get(f"/page/jobs/{job}/files/{number}").status_code == 404


@KEYED
def test_a_tenant_sees_no_file_of_anothers_job(api: Api, settings: dict[str, str]) -> None:
    root, acme, bravo = (key_of(api, name, admin=name == "root") for name in ("root", "acme", "bravo"))
    headers = {"Authorization": f"Bearer {root}"}
    body = {"model": "zimg", "server": "gpu1", "endpoint": "http://127.0.0.1:9/generate", "slots": 1}
    assert api.client.post("/admin/register", json=body, headers=headers).status_code == 201
    job = completed(api, FILE, headers={"Authorization": f"Bearer {acme}"})
    seen = {}
    for name, key in (("acme", acme), ("bravo", bravo)):
        who = visitor(api)
        who.log_in(key)
        seen[name] = who.get(f"/page/jobs/{job}/files/0").status_code
    assert seen == {"acme": 200, "bravo": 404}


# -- on the command line -----------------------------------------------------------------------------------------------


def run(httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch, result: Any, *words: str) -> Any:
    monkeypatch.setenv("SLOTKEEPER_URL", httpserver.url_for("").rstrip("/"))
    job = {"job_id": "j1", "model": "zimg", "status": "completed", "result": result}
    httpserver.expect_request("/queue/submit", "POST").respond_with_json(job, 202)
    httpserver.expect_request("/queue/jobs/j1", "GET").respond_with_json(job)
    return CliRunner().invoke(main, words)


@pytest.mark.parametrize("words", [("job", "j1"), ("submit", "zimg", "{}", "--wait")])
def test_the_command_line_saves_the_file_of_a_result(
    words: tuple[str, ...], httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = run(httpserver, monkeypatch, {"image": FILE}, *words, "--output", str(tmp_path / "cat.png"))
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "cat.png").read_bytes() == PNG
    assert TEXT not in ran.output and f"{len(PNG)} bytes" in ran.output


def test_several_result_files_are_numbered(
    httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(httpserver, monkeypatch, [URL, FILE], "job", "j1", "--output", str(tmp_path / "a.png")).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1.png", "a-2.png"]


def test_a_result_without_files_is_saved_as_json(
    httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(httpserver, monkeypatch, {"n": 1}, "job", "j1", "--output", str(tmp_path / "a")).exit_code == 0
    assert orjson.loads((tmp_path / "a").read_bytes()) == {"n": 1}


@pytest.mark.parametrize("words", [("--output", "x"), ("--wait", "--count", "2", "--output", "x")])
def test_only_the_result_of_one_ended_job_can_be_saved(
    words: tuple[str, ...], httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(httpserver, monkeypatch, None, "submit", "zimg", "{}", *words).exit_code == 2


@pytest.mark.parametrize("status", ["running", "failed"])
def test_a_job_without_a_result_saves_no_file_and_fails(
    status: str, httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLOTKEEPER_URL", httpserver.url_for("").rstrip("/"))
    job = {"job_id": "j1", "model": "zimg", "status": status}
    httpserver.expect_request("/queue/jobs/j1", "GET").respond_with_json(job)
    ran = CliRunner().invoke(main, ["job", "j1", "--output", str(tmp_path / "a")])
    assert ran.exit_code == 1 and f"the job is {status}" in ran.output and not list(tmp_path.iterdir())


def test_a_file_that_is_no_base64_is_named(
    httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = {"media_type": "image/png", "base64": "!"}
    ran = run(httpserver, monkeypatch, {"image": broken}, "job", "j1", "--output", str(tmp_path / "a"))
    assert ran.exit_code == 1 and "the file at /image is no base64" in ran.output


# -- large payloads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"MAX_BODY_BYTES": "3000000"}])
@pytest.mark.parametrize(("length", "status"), [(2_000_000, 422), (4_000_000, 413)])
def test_the_refusal_of_a_large_payload_names_both_limits(
    api: Api, settings: dict[str, str], length: int, status: int
) -> None:
    api.register()
    answer = api.submit(payload={"image": "x" * length})
    assert answer.status_code == status
    assert "SLOTKEEPER_MAX_BODY_BYTES" in answer.json["detail"]
    assert "max_payload_bytes" in answer.json["detail"]
