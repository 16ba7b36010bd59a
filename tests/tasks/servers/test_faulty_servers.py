"""Servers with wrong or inconsistent responses: the outcome of the job in each mode, and what it costs.

The cost `held` means that the worker continues to poll and holds the slot, until the model's max_poll_time ends.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from routing.dispatch.decision import decide
from routing.dispatch.outcome import Outcome, OutcomeKind
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.values import QueuedJob, Run
from slotkeeper.registry.model_config import ModelConfig
from tasks.servers import Description, HealthKind, RunDetails, presets
from tests.support.harness import SETTINGS
from tests.support.scripted import Act, Seen, answer

_JOB = QueuedJob("j", 1, "zimg", 5, "default")
RUN = Run(_JOB, "{}", 1, 0, 0, None, None, None, "gpu", "gpu-slot0", 0, cancel_requested=False)
MODES = ("sync", "async", "auto", "callback")
HELD = "held"
_NEVER = threading.Event()
ACCEPTED = answer({"status": "processing", "job_id": "j1"})
HTML = answer(b"<html>It works!</html>")
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

Respond = Callable[[Seen, int], Act]  # request, number of earlier requests of its method -> response


def always(act: Act) -> Respond:
    return lambda _request, _earlier: act


def drip(piece: bytes) -> Act:
    """Return a response that sends this chunk every 20 ms, without end."""

    def send(sock: Any) -> None:
        sock.sendall(HEAD)
        while True:
            sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            _NEVER.wait(0.02)

    return send


def flood(sock: Any) -> None:
    """Send chunks until the client closes the connection."""
    sock.sendall(HEAD)
    while True:
        sock.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")


@dataclass(frozen=True)
class FaultyServer:
    """The responses of a server to the submit and to polls, and the expected verdicts: kind, code and cost.

    first: of the submit.  then: of the poll after it.  by_mode: of the submit in modes with another verdict.
    """

    name: str
    submit: Respond
    first: tuple[OutcomeKind, str, object]
    poll: Respond | None = None
    then: tuple[OutcomeKind, str, object] | None = None
    by_mode: dict[str, tuple[OutcomeKind, str, object]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


HEARTBEATS = always(drip(b" "))
ENDLESS_RESULT = always(drip(b'{"a":'))

PENDING = (OutcomeKind.PENDING, "", HELD)
BAD_RESPONSE = (OutcomeKind.RETRY, "bad_answer", Reason.SERVER_ERROR)
NO_RESPONSE = (OutcomeKind.UNKNOWN, "no_answer", HELD)
STILL_PENDING = (OutcomeKind.PENDING, "bad_answer", HELD)
POLL_FAILED = (OutcomeKind.PENDING, "poll_failed", HELD)

FAULTY_SERVERS = [
    FaultyServer("a page instead of a result", always(HTML), BAD_RESPONSE),
    FaultyServer("a redirect to a page", always(answer(b"", 302, Location="/login")), BAD_RESPONSE),
    FaultyServer("an empty response", always(answer(b"")), BAD_RESPONSE),
    FaultyServer("the response to another job", always(answer({"status": "success"}, X_Job_Id="job-2")), BAD_RESPONSE),
    FaultyServer(
        "a 200 with an error inside",
        always(answer({"status": "error", "error": "out of memory"})),
        (OutcomeKind.RETRY, "job_failed", Reason.SERVER_ERROR),
    ),
    FaultyServer("an error without a status word", always(answer({"error": "out of memory"})), BAD_RESPONSE),
    FaultyServer(
        "an accepted job without an id",
        always(answer({"status": "processing"})),
        BAD_RESPONSE,
        by_mode={"callback": PENDING},
    ),
    FaultyServer(
        "an invalid id",
        always(answer({"status": "processing", "job_id": {"id": 1}})),
        BAD_RESPONSE,
        by_mode={"callback": PENDING},
    ),
    FaultyServer("endless heartbeats", HEARTBEATS, NO_RESPONSE),
    FaultyServer("a result that never ends", ENDLESS_RESULT, NO_RESPONSE),
    FaultyServer(
        "an endless response", always(flood), (OutcomeKind.FAILED, "answer_too_large", Reason.INVALID_REQUEST)
    ),
    FaultyServer(
        "a cancel that was not requested",
        always(answer({"status": "canceled"})),
        (OutcomeKind.CANCELED, "canceled", Reason.SERVER_ERROR),
    ),
    FaultyServer("a page instead of a status", always(ACCEPTED), PENDING, always(HTML), STILL_PENDING),
    FaultyServer(
        "the status of another job",
        always(ACCEPTED),
        PENDING,
        always(answer({"status": "completed", "job_id": "j2", "result": "not ours"})),
        STILL_PENDING,
    ),
    FaultyServer(
        "a poll with status 429", always(ACCEPTED), PENDING, always(answer({"error": "slow down"}, 429)), POLL_FAILED
    ),
    FaultyServer(
        "a poll with status 503", always(ACCEPTED), PENDING, always(answer({"status": "busy"}, 503)), POLL_FAILED
    ),
    FaultyServer(
        "a poll with the page of a gateway", always(ACCEPTED), PENDING, always(answer(b"<html>", 502)), POLL_FAILED
    ),
    FaultyServer(
        "a poll with a page of status 404", always(ACCEPTED), PENDING, always(answer(b"<html>", 404)), POLL_FAILED
    ),
    FaultyServer("a poll with endless heartbeats", always(ACCEPTED), PENDING, HEARTBEATS, POLL_FAILED),
    FaultyServer(
        "a status of 200 with an error inside",
        always(ACCEPTED),
        PENDING,
        always(answer({"status": "failed", "job_id": "j1", "error": "boom"})),
        (OutcomeKind.RETRY, "job_failed", Reason.SERVER_ERROR),
    ),
    FaultyServer(
        "a job that the server forgets",
        always(ACCEPTED),
        PENDING,
        always(answer({"error": "unknown"}, 404)),
        (OutcomeKind.LOST, "not_found", Reason.SERVER_LOST),
    ),
    FaultyServer(
        "an unknown status word",
        always(ACCEPTED),
        PENDING,
        always(answer({"status": "pondering", "job_id": "j1"})),
        STILL_PENDING,
    ),
]


def cost_of(outcome: Outcome) -> object:
    if outcome.kind in (OutcomeKind.PENDING, OutcomeKind.UNKNOWN):
        return HELD
    return decide(RUN, outcome, ModelConfig(), SETTINGS, 0, canceling=False).reason


def verdict(outcome: Outcome) -> tuple[OutcomeKind, str, object]:
    return outcome.kind, outcome.code, cost_of(outcome)


@pytest.fixture
def start_server(scripted, ours):
    """Return a function that starts an HTTP server, and returns its adapter for a mode, and the server itself."""

    def start(respond: Callable[[Seen], Act], mode: str = "auto", **fields: Any):
        description = Description.model_validate({"mode": mode, **fields})
        http_server = scripted(respond)
        return ours(http_server.url + "/generate", description, max_response_bytes=100_000), http_server

    return start


CALL = RunDetails("job-1", 1, {"prompt": "a cat"}, callback_url="http://me/cb", deadline_s=60)
SHORT_CALL = CALL._replace(deadline_s=0.5)
"""Only for responses without end: the test process may pause for longer than this, such as for garbage collection."""


def call_for(respond: Respond | None) -> RunDetails:
    return SHORT_CALL if respond in (HEARTBEATS, ENDLESS_RESULT) else CALL


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("faulty", FAULTY_SERVERS, ids=str)
def test_a_wrong_response_has_the_expected_outcome_and_cost(faulty: FaultyServer, mode: str, start_server):
    counts = {"GET": 0, "POST": 0}

    def respond(request: Seen) -> Act:
        counts[request.method] += 1
        step = faulty.submit if request.method == "POST" or faulty.poll is None else faulty.poll
        return step(request, counts[request.method] - 1)

    server, _ = start_server(respond, mode)
    outcome = server.submit(call_for(faulty.submit))
    assert verdict(outcome) == faulty.by_mode.get(mode, faulty.first)
    if faulty.then is not None:
        assert verdict(server.status(call_for(faulty.poll), outcome.remote_id)) == faulty.then


@pytest.mark.parametrize("mode", MODES)
def test_a_result_that_can_be_read_once_is_read_once(mode: str, start_server):
    """A worker that stops between the read and the commit loses the result: this costs the job a crash."""
    results = [answer({"status": "completed", "job_id": "j1", "result": 7})]

    def respond(request: Seen) -> Act:
        if request.method == "POST":
            return ACCEPTED
        return results.pop() if results else answer({"error": "gone"}, 404)

    server, http_server = start_server(respond, mode)
    remote_id = server.submit(CALL).remote_id
    first = server.status(CALL, remote_id)
    assert (first.kind, first.result) == (OutcomeKind.DONE, 7)
    assert len(http_server.seen) == 2
    assert verdict(server.status(CALL, remote_id)) == (OutcomeKind.LOST, "not_found", Reason.SERVER_LOST)


def test_a_result_with_its_own_step_is_requested_once(start_server):
    responses = {"/generate": ACCEPTED, "/status/j1": answer({"status": "completed"}), "/result/j1": answer({"x": 1})}
    result_step = {"path": "/result/{{id}}", "result": ""}
    server, http_server = start_server(lambda request: responses[request.path], "async", result=result_step)
    outcome = server.status(CALL, server.submit(CALL).remote_id)
    assert (outcome.kind, outcome.result) == (OutcomeKind.DONE, {"x": 1})
    assert [request.path for request in http_server.seen] == list(responses)


@pytest.mark.parametrize("mode", MODES)
def test_a_cancel_without_effect_ends_no_run(mode: str, start_server):
    """The server confirms the cancel, and the job completes: the polls decide, and the slot is not freed before."""
    polls = iter([{"status": "processing", "job_id": "j1"}, {"status": "completed", "job_id": "j1", "result": 7}])

    def respond(request: Seen) -> Act:
        if "/cancel/" in request.path:
            return answer({"status": "canceled", "job_id": "j1"})
        return ACCEPTED if request.method == "POST" else answer(next(polls))

    server, _ = start_server(respond, mode)
    remote_id = server.submit(CALL).remote_id
    assert server.cancel(CALL, remote_id) is True
    assert server.status(CALL, remote_id).kind is OutcomeKind.PENDING
    assert server.status(CALL, remote_id).kind is OutcomeKind.DONE
    assert server.description.cancel_frees_slot == "eventual"


@pytest.mark.parametrize("name", presets.names())
def test_no_preset_frees_a_slot_by_a_cancel_alone(name: str):
    assert Description.model_validate(presets.get(name)).cancel_frees_slot != "immediate"


def test_a_server_whose_health_check_blocks_is_busy(start_server):
    """The health check of some servers waits for the end of a generation step, up to 12 s: they are busy."""
    server, http_server = start_server(lambda _: lambda _sock: http_server.stopped.wait(10), health={"read_s": 0.2})
    started = time.monotonic()
    assert server.health().kind is HealthKind.BUSY
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (answer(b"ok"), HealthKind.GARBAGE),
        (HTML, HealthKind.GARBAGE),
        (answer({"active_jobs": "two"}), HealthKind.GARBAGE),
        (answer({"active_jobs": -1}), HealthKind.GARBAGE),
        (answer({"active_jobs": 1, "job_ids": "j1"}), HealthKind.GARBAGE),
        (answer({}, 404), HealthKind.FOREIGN),
        (answer({"active_jobs": 0}, 503), HealthKind.BUSY),
        (flood, HealthKind.GARBAGE),
    ],
)
def test_an_invalid_health_report_has_no_counts(response: Act, kind: HealthKind, start_server):
    server, _ = start_server(lambda _: response)
    health = server.health()
    assert (health.kind, health.active_jobs, health.job_ids) == (kind, None, None)


def test_a_run_ends_by_its_final_status_after_other_responses(start_server):
    """Pages, busy responses and responses about other jobs leave the run pending; its final status ends it."""
    polls = iter(
        [
            HTML,
            answer({"status": "busy"}, 503),
            answer({"status": "completed", "job_id": "j9", "result": "not ours"}),
            answer({"status": "queued", "job_id": "j1"}),
            answer(b"", 204),
            answer({"status": "completed", "job_id": "j1", "result": "ours"}),
        ]
    )
    server, _ = start_server(lambda request: ACCEPTED if request.method == "POST" else next(polls))
    remote_id = server.submit(CALL).remote_id
    outcomes = [server.status(CALL, remote_id) for _ in range(6)]
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.PENDING] * 5 + [OutcomeKind.DONE]
    assert outcomes[-1].result == "ours"
