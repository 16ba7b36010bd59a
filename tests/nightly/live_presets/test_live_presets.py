"""Presets with the servers that they describe, installed from the registry into separate virtual environments.

    make live-presets                    # takes minutes, and a few hundred MiB in var/live
    make live-presets LIVE="cog mosec"

Not part of `make test`: the newest releases are installed, so that a change of a server is noticed here first.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

from routing.dispatch.outcome import Outcome, OutcomeKind
from tasks.servers import Description, HealthKind, RunDetails, ServerAdapter, presets
from tasks.servers.probe import recognize
from tasks.servers.session import run_with_http_client
from tests.nightly.live_presets.servers import Live, installed, started, wanted
from tests.support.blocking import Blocking, Loop

pytestmark = [pytest.mark.live_servers, pytest.mark.timeout(600)]


@dataclass
class Running:
    live: Live
    url: str
    server: Blocking

    @property
    def endpoint(self) -> str:
        return self.url + self.live.path

    def submit(self, which: str) -> tuple[RunDetails, Outcome]:
        call = RunDetails(f"job-{time.time_ns():x}", 1, self.live.payloads[which], deadline_s=30.0)
        return call, self.server.submit(call)

    def ended(self, which: str) -> Outcome:
        """What comes of a job, polled if need be."""
        call, outcome = self.submit(which)
        while outcome.kind is OutcomeKind.PENDING and outcome.remote_id:
            outcome = self.server.status(call, outcome.remote_id)
        return outcome


@pytest.fixture(scope="module", params=wanted(), ids=str)
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    live: Live = request.param
    with started(live, installed(live.package)) as url, Loop() as loop:
        description = Description.model_validate(live.described or presets.get(live.preset))
        yield Running(live, url, Blocking(ServerAdapter(url + live.path, description), loop))


def test_a_job_completes_with_its_result(running: Running):
    outcome = running.ended("good")
    assert outcome.kind is OutcomeKind.DONE, outcome
    if running.live.result is not None:
        assert outcome.result == running.live.result


@pytest.mark.parametrize("which", ["wrong", "boom"])
def test_a_failed_job_has_the_outcome_of_its_preset(running: Running, which: str):
    outcome = running.ended(which)
    assert outcome.kind is running.live.becomes[which], outcome


def test_a_job_right_after_a_failed_one_completes(running: Running):
    for _ in range(10):
        assert running.ended("boom").kind is running.live.becomes["boom"]
        assert running.ended("good").kind is OutcomeKind.DONE


def test_health_is_up_and_stays_up_during_a_job(running: Running):
    if running.server.description.health is None:
        pytest.skip("this preset has no health check")
    assert running.server.health().kind is HealthKind.UP
    with _slow_one_under_way(running):
        assert running.server.health().kind in (HealthKind.UP, HealthKind.BUSY)


def test_a_full_server_is_busy_or_queues(running: Running):
    with _slow_one_under_way(running):
        _, outcome = running.submit("good")
        assert outcome.kind in (
            running.live.when_full,
            OutcomeKind.PENDING if running.live.when_full is OutcomeKind.DONE else None,
        )


def test_a_run_can_be_canceled(running: Running):
    if not running.live.cancels:
        pytest.skip("its servers do not cancel what runs")
    found: list[Outcome] = []
    call = RunDetails("job-to-cancel", 1, running.live.payloads["slow"], deadline_s=30.0)
    thread = threading.Thread(target=lambda: found.append(running.server.submit(call)))
    thread.start()
    _until(lambda: running.server.cancel(call))
    thread.join(20)
    assert found[0].kind is OutcomeKind.CANCELED


def test_the_server_is_recognized(running: Running):
    if not running.live.recognized:
        pytest.skip("it shows no sign of what it is")
    found = run_with_http_client(partial(recognize, running.url))
    # A BentoML service that has a task, too, shows signs of both.
    assert running.live.preset in (found.preset, *(one.preset for one in found.candidates))
    assert urlsplit(running.url).port


@contextmanager
def _slow_one_under_way(running: Running) -> Iterator[None]:
    call = RunDetails(f"slow-{time.time_ns():x}", 1, running.live.payloads["slow"], deadline_s=30.0)
    ends: list[Outcome] = []
    thread = threading.Thread(target=lambda: ends.append(running.server.submit(call)))
    thread.start()
    time.sleep(0.7)  # Nothing outside says that it has begun.
    try:
        yield
    finally:
        thread.join(30)
        while ends and ends[0].kind is OutcomeKind.PENDING and ends[0].remote_id:
            ends[0] = running.server.status(call, ends[0].remote_id)


def _until(holds: Any) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
