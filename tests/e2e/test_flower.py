"""Flower, as `slotkeeper up` runs it, is behind its password as a whole."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from flower.urls import handlers
from tornado.web import URLSpec

from local.ports import free_port
from tests.support.stack import BIN, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

# Its own style sheets and pages without content, which anybody can get where it is published.
OPEN = (r"/static/(.*)", r".*", r"/login/?", "/logout")
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH")


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, tuple[str, str]]]:
    """Its address, and who may come in."""
    home, port = tmp_path_factory.mktemp("flower"), free_port()
    with Stack(home, {"SLOTKEEPER_FLOWER_PORT": str(port)}) as stack:
        process = stack.start("flower", [str(BIN / "slotkeeper"), "flower"])
        url = f"http://127.0.0.1:{port}"
        process.shows(lambda: _status("GET", f"{url}/healthcheck"), "it answers")
        yield url, ("slotkeeper", Path(home, "flower-password").read_text().strip())


def _status(method: str, url: str, auth: tuple[str, str] | None = None) -> int:
    try:
        return requests.request(method, url, auth=auth, timeout=10, allow_redirects=False).status_code
    except requests.ConnectionError:
        return 0


def _addresses() -> list[str]:
    patterns = [it.regex.pattern.removesuffix("$") if isinstance(it, URLSpec) else it[0] for it in handlers]
    return [re.sub(r"\(.[+*]\)", "x", pattern) for pattern in patterns if pattern not in OPEN]


def test_nothing_of_flower_is_shown_or_done_without_its_password(flower: tuple[str, tuple[str, str]]) -> None:
    url, _ = flower
    asked = _addresses()
    assert {"/metrics", "/healthcheck", "/api/task/send-task/x", "/tasks"} <= set(asked)
    for who in (None, ("slotkeeper", ""), ("slotkeeper", "wrong"), ("", "")):
        shown = {(method, path): _status(method, url + path, who) for path in asked for method in METHODS}
        # 403: no token against forged requests; 405: not a method there.
        assert {it: status for it, status in shown.items() if status not in (401, 403, 404, 405)} == {}
        assert {shown["GET", path] for path in ("/", "/metrics", "/healthcheck", "/tasks", "/api/workers")} == {401}


def test_who_knows_the_password_sees_flower(flower: tuple[str, tuple[str, str]]) -> None:
    url, who = flower
    assert {_status("GET", url + path, who) for path in ("/", "/metrics", "/healthcheck", "/tasks")} == {200}
