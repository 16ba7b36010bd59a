"""Limits hold over all processes: four web processes, 64 clients, workers with more slots than a tenant may hold."""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from app.up.ports import free_port
from tests.support.http_api import HttpApi
from tools.cluster.postgres_process import Postgres
from tools.cluster.stack import Stack, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RATE, BURST, CLIENTS, MOST_SLOTS = 20, 40, 64, 3


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def keyed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stack]:
    settings = {"SLOTKEEPER_REQUIRE_KEYS": "true"}
    postgres: Postgres | None = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    url = postgres.create() if postgres is not None else ""
    with Stack(
        tmp_path_factory.mktemp("limits"), settings | ({"SLOTKEEPER_DATABASE_URL": url} if url else {})
    ) as stack:
        stack.worker()
        stack.web()
        yield stack
    if postgres is not None:
        postgres.drop(url)


@pytest.fixture(scope="module")
def doors(keyed: Stack) -> Iterator[list[str]]:
    """The addresses of four web processes."""
    urls = [keyed.url]
    for n in range(3):
        port = free_port()
        keyed.start(f"web{n}", ["env", f"SLOTKEEPER_PORT={port}", sys.executable, "-P", "-m", "app.server"])
        urls.append(f"http://127.0.0.1:{port}")
    for url in urls:
        eventually(lambda url=url: _answers(url), f"{url} answers")
    yield urls


@pytest.fixture(scope="module")
def operator(keyed: Stack) -> HttpApi:
    api = HttpApi(keyed)
    api.session.headers["Authorization"] = f"Bearer {_key(keyed, 'tenants', 'add', 'ops', '--operate')}"
    api.register("limited", keyed.server("limited-api1", 8))
    return api


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health/live", timeout=2).ok
    except requests.RequestException:
        return False


def _key(stack: Stack, *words: str) -> str:
    return str(json.loads(stack.run([sys.executable, "-P", "-m", "app.cli", *words, "--json"]))["key"])


def test_rates_and_slots_are_exact_over_four_web_processes_and_64_clients(
    keyed: Stack, doors: list[str], operator: HttpApi
) -> None:
    key = _key(keyed, "tenants", "add", "acme", "--rate", str(RATE), "--burst", str(BURST))
    changed = operator.call("PATCH", "/admin/tenants/acme", json={"limits": {"max_slots": MOST_SLOTS}})
    assert changed.ok, changed.text
    for url in doors:  # Each reads the catalog for this answer.
        shown = requests.get(f"{url}/tenants/acme", headers=dict(operator.session.headers), timeout=10).json()
        assert shown["limits"]["max_slots"] == MOST_SLOTS

    def submit(url: str) -> list[int]:
        with requests.Session() as session:
            session.headers["Authorization"] = f"Bearer {key}"
            body = {"model": "limited", "payload": {"seconds": 0.05}}
            return [session.post(f"{url}/queue/submit", json=body, timeout=30).status_code for _ in range(5)]

    began = time.monotonic()
    urls = [doors[n % len(doors)] for n in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        counts = Counter(status for answers in clients.map(submit, urls) for status in answers)
    took_s = time.monotonic() - began
    assert counts.keys() <= {202, 429}, counts
    assert BURST <= counts[202] <= BURST + RATE * took_s + 1, (counts, took_s)

    def all_have_ended() -> bool:
        by_state = operator.call("GET", "/admin/ledger").json()["by_state"]
        return bool(by_state.get("completed", 0) == counts[202])

    eventually(all_have_ended, "all accepted jobs have ended", 120)
    assert _most_at_once(keyed.home / "limited-api1.journal") == MOST_SLOTS


def _most_at_once(journal: Path) -> int:
    """Return how many runs were at the server at once, at most."""
    runs = [json.loads(line) for line in journal.read_text().splitlines()]
    changes = sorted(change for run in runs for change in ((run["started_ns"], 1), (run["ended_ns"], -1)))
    at_once = most = 0
    for _, change in changes:
        at_once += change
        most = max(most, at_once)
    return most
