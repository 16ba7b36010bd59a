"""Limits hold over all processes: four web processes, 64 clients, workers with more slots than a tenant may hold."""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

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
        stack.maintenance()
        stack.beat()
        stack.worker()
        stack.web()
        yield stack
    if postgres is not None:
        postgres.drop(url)


@pytest.fixture(scope="module")
def urls(keyed: Stack) -> Iterator[list[str]]:
    """The addresses of four web processes."""
    found = [keyed.url]
    for n in range(3):
        found.append(f"http://127.0.0.1:{free_port()}")
        _start_web(keyed, f"web{n}", found[-1])
    yield found


@pytest.fixture(scope="module")
def operator(keyed: Stack) -> HttpApi:
    api = HttpApi(keyed)
    api.session.headers["Authorization"] = f"Bearer {_key(keyed, 'tenants', 'add', 'ops', '--operate')}"
    api.register("limited", keyed.server("limited-api1", 8))
    return api


def _start_web(stack: Stack, name: str, url: str) -> None:
    port = url.rpartition(":")[2]
    stack.start(name, ["env", f"SLOTKEEPER_PORT={port}", sys.executable, "-P", "-m", "app.server"])
    eventually(lambda: _answers(url), f"{url} answers")


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health/live", timeout=2).ok
    except requests.RequestException:
        return False


def _key(stack: Stack, *words: str) -> str:
    return str(json.loads(stack.run([sys.executable, "-P", "-m", "app.cli", *words, "--json"]))["key"])


def test_rates_and_slots_are_exact_over_four_web_processes_and_64_clients(
    keyed: Stack, urls: list[str], operator: HttpApi
) -> None:
    key = _key(keyed, "tenants", "add", "acme", "--rate", str(RATE), "--burst", str(BURST))
    changed = operator.call("PATCH", "/admin/tenants/acme", json={"limits": {"max_slots": MOST_SLOTS}})
    assert changed.ok, changed.text
    for url in urls:  # Each reads the catalog for this answer.
        shown = requests.get(f"{url}/tenants/acme", headers=dict(operator.session.headers), timeout=10).json()
        assert shown["limits"]["max_slots"] == MOST_SLOTS

    def submit(url: str) -> list[int]:
        with requests.Session() as session:
            session.headers["Authorization"] = f"Bearer {key}"
            body = {"model": "limited", "payload": {"seconds": 0.05}}
            return [session.post(f"{url}/queue/submit", json=body, timeout=30).status_code for _ in range(5)]

    began = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as clients:
        sent = clients.map(submit, [urls[n % len(urls)] for n in range(CLIENTS)])
        counts = Counter(status for answers in sent for status in answers)
    took_s = time.monotonic() - began
    assert counts.keys() <= {202, 429}, counts
    assert BURST <= counts[202] <= BURST + RATE * took_s + 1, (counts, took_s)

    def all_have_ended() -> bool:
        by_state = operator.call("GET", "/admin/ledger").json()["by_state"]
        return bool(by_state.get("completed", 0) == counts[202])

    eventually(all_have_ended, "all accepted jobs have ended", 120)
    assert _most_at_once(_runs(keyed.home / "limited-api1.journal")) == MOST_SLOTS


def test_tenants_stay_within_their_limits_and_lose_no_job_while_processes_die_and_a_key_is_revoked(
    keyed: Stack, urls: list[str], operator: HttpApi
) -> None:
    operator.register("shared", keyed.server("shared-api1", 8))
    keys = {tenant: _key(keyed, "tenants", "add", tenant) for tenant in ("bravo", "carla")}
    most_slots = {"bravo": 2, "carla": 4}
    for tenant, most in most_slots.items():
        limits = {"max_slots": most, "max_waiting": 500}
        assert operator.call("PATCH", f"/admin/tenants/{tenant}", json={"limits": limits}).ok
    accepted: dict[str, set[str]] = {tenant: set() for tenant in keys}
    sent_s: list[float] = []  # when bravo sent its accepted jobs

    def submit(n: int) -> None:
        tenant = ("bravo", "carla")[n % 2]
        with requests.Session() as session:
            session.headers["Authorization"] = f"Bearer {keys[tenant]}"
            for k in range(25) if tenant == "carla" else count():  # The others go on until their key is refused.
                key = {"Idempotency-Key": f"{tenant}-{n}-{k}"}
                body = {"model": "shared", "payload": {"seconds": 0.02}}
                while True:
                    began_s = time.monotonic()
                    try:
                        answer = session.post(f"{urls[(n + k) % 4]}/queue/submit", json=body, headers=key, timeout=30)
                    except requests.RequestException:
                        continue  # Its process was killed: the same request is sent again.
                    if answer.status_code in (200, 202):
                        accepted[tenant].add(answer.json()["job_id"])
                        if tenant == "bravo":
                            sent_s.append(began_s)
                        break
                    if answer.status_code == 401:
                        return
                    assert answer.status_code in (429, 503), answer.text

    with ThreadPoolExecutor(16) as clients:
        sent = [clients.submit(submit, n) for n in range(16)]
        eventually(lambda: sum(map(len, accepted.values())) > 60, "some are accepted", 60)
        keyed.processes["worker"].kill()
        keyed.processes["web0"].kill()
        (key_id,) = (one["key_id"] for one in operator.call("GET", "/tenants/bravo/keys").json()["keys"])
        assert operator.call("DELETE", f"/tenants/bravo/keys/{key_id}").status_code == 204
        revoked_s = time.monotonic()
        keyed.worker("worker2")
        _start_web(keyed, "web0", urls[1])
        for one in sent:
            one.result(timeout=120)
    assert len(accepted["carla"]) == 8 * 25, "each job was accepted"
    assert max(sent_s) - revoked_s <= 1.0, "the key was revoked"

    def all_have_completed() -> bool:
        by_state = operator.call("GET", "/admin/ledger").json()["by_state"]
        return not any(by_state.get(state, 0) for state in ("queued", "running", "delayed"))

    eventually(all_have_completed, "all jobs have ended", 150)
    ended = {job_id: operator.job(job_id) for jobs in accepted.values() for job_id in jobs}
    assert {job["status"] for job in ended.values()} == {"completed"}
    runs = _runs(keyed.home / "shared-api1.journal")
    for tenant, most in most_slots.items():
        own = [run for run in runs if ended.get(run["job_id"], {}).get("tenant") == tenant]
        assert _most_at_once(own) == most, tenant


def _runs(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()]


def _most_at_once(runs: list[dict[str, Any]]) -> int:
    """Return how many runs were at the server at once, at most."""
    changes = sorted(change for run in runs for change in ((run["started_ns"], 1), (run["ended_ns"], -1)))
    at_once = most = 0
    for _, change in changes:
        at_once += change
        most = max(most, at_once)
    return most
