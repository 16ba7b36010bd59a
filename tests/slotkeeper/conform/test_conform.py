"""`slotkeeper conform` reports each violation of a server in words, and tests no server that is unfit for a test."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import requests
from click.testing import CliRunner

from app.cli.__main__ import main
from slotkeeper.conform.check_context import ServerUnderTest
from slotkeeper.conform.check_runner import CannotTest, CheckResult, CheckStatus, conform, run_check
from slotkeeper.conform.protocol_checks import CHECKS, Check
from slotkeeper.serve import ReferenceServer, ServeConfig, gated
from tests.support.scripted import Scripted, Seen, answer

Edit = Callable[[str, int, dict[str, Any]], tuple[int, dict[str, Any]]]


@contextmanager
def lying(edit: Edit, **options: Any) -> Iterator[ServerUnderTest]:
    """The reference server behind a proxy that changes its responses: edit(path, status, body)."""

    def forward(seen: Seen) -> bytes:
        names = ("x-source", "x-job-id", "x-attempt", "idempotency-key")
        headers = {name: seen.headers[name] for name in names if name in seen.headers}
        there = requests.request(seen.method, server.url + seen.path, data=seen.body, headers=headers, timeout=30)
        status, body = edit(seen.path, there.status_code, there.json())
        again = {name: there.headers[name] for name in ("Retry-After",) if name in there.headers}
        return answer(body, status, **again)

    config = ServeConfig(port=0, **{"slots": 2, **options})
    with Scripted(forward) as proxy, ReferenceServer(gated.model, config) as server:
        yield ServerUnderTest(proxy.url, "async" if options.get("asynchronous") else "sync")


def the(name: str) -> Check:
    return next(check for check in CHECKS if check.name == name)


def in_health(**changed: Any) -> Edit:
    return lambda path, status, body: (status, {**body, **changed} if path == "/health" else body)


def in_status(answered: int, **changed: Any) -> Edit:
    return lambda path, was, body: (answered, {**body, **changed}) if path.startswith("/status/") else (was, body)


def busy_is(status: int) -> Edit:
    return lambda _path, was, body: (status if was == 503 else was, body)


LIES = [
    ("no-more-than-slots", in_health(slots=1), {"asynchronous": True}),
    ("busy-when-full", busy_is(429), {}),
    ("health-counts-what-runs", in_health(active_jobs=0), {}),
    ("health-names-what-runs", in_health(job_ids=["somebody"]), {}),
    ("unknown-id", in_status(200, status="completed"), {}),
    ("processing-until-the-end", in_status(200, status="completed"), {"asynchronous": True}),
    ("wrong-request", lambda _path, was, body: (500 if was == 422 else was, body), {}),
    ("result-of-the-function", lambda _path, was, body: (was, {"output": body}), {}),
]


@pytest.mark.parametrize(("name", "lie", "options"), LIES, ids=[name for name, *_ in LIES])
def test_a_clause_that_is_not_kept_is_found(name: str, lie: Edit, options: dict[str, Any]):
    with lying(lie, **options) as served:
        verdict = run_check(the(name), served)
    assert verdict.ended is CheckStatus.FAILED
    assert verdict.why


def test_a_failed_check_reports_what_it_observed():
    with lying(busy_is(429)) as served:
        verdict = run_check(the("busy-when-full"), served)
    assert verdict.why == "the answer of a full server is (429, 'busy'), not (503, 'busy')"


def test_a_check_of_a_feature_that_the_server_lacks_is_skipped():
    with lying(in_health()) as served:
        served.without = frozenset({"cancel"})
        verdict = run_check(the("cancel-of-what-runs"), served)
    assert verdict == CheckResult(verdict.check, CheckStatus.SKIPPED, "this server is said to be without cancel")


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (in_health(active_jobs=1), "not idle"),
        (in_health(slots=0), "no slots"),
        (in_health(slots=None), "not as described"),
    ],
)
def test_a_server_that_cannot_be_tested_is_rejected_before_the_first_check(lie: Edit, why: str):
    with lying(lie) as served, pytest.raises(CannotTest, match=why):
        list(conform(served))


def test_a_server_that_does_not_wrap_the_model_is_unfit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slotkeeper.conform.gate.ARRIVAL_S", 0.5)
    with (
        ReferenceServer(lambda payload: {"echo": payload}, ServeConfig(port=0)) as server,
        pytest.raises(CannotTest, match="must wrap the model"),
    ):
        list(conform(ServerUnderTest(server.url, "sync")))


def test_a_server_that_is_not_there_is_unfit():
    with pytest.raises(CannotTest, match="cannot be asked"):
        list(conform(ServerUnderTest("http://127.0.0.1:1", "sync")))


def test_the_command_reports_each_check_and_exits_with_its_status():
    ran = CliRunner().invoke(main, ["conform", "--only", "unknown-id", "--only", "busy-when-full", "--json"])
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    assert report["counts"] == {"passed": 2, "failed": 0, "skipped": 0}
    assert [check["check"] for check in report["checks"]] == ["busy-when-full", "unknown-id"]


def test_the_command_fails_when_a_clause_is_not_kept():
    with lying(busy_is(429)) as served:
        ran = CliRunner().invoke(main, ["conform", served.url, "--only", "busy-when-full"])
    assert ran.exit_code == 1
    assert "failed" in ran.stdout and "429" in ran.stdout


def test_the_command_refuses_a_check_that_does_not_exist():
    assert CliRunner().invoke(main, ["conform", "--only", "no-such-check"]).exit_code == 2
