"""Servers that do not mean what they say, or change it under way: what comes of the job, in each mode, and who pays.

`held` in place of a price: the worker goes on asking, the slot stays taken, and the model's max_poll_time is the end.
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
from tasks.servers import Call, Description, HealthKind, presets
from tests.support.scripted import Act, Seen, answer
from tests.support.stage import SETTINGS

_JOB = QueuedJob("j", 1, "zimg", 5, "default")
RUN = Run(_JOB, "{}", 1, 0, 0, None, None, None, "gpu", "gpu-slot0", 0, cancel_requested=False)
MODES = ("sync", "async", "auto", "callback")
HELD = "held"
_NEVER = threading.Event()
ACCEPTED = answer({"status": "processing", "job_id": "j1"})
HTML = answer(b"<html>It works!</html>")
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

Says = Callable[[Seen, int], Act]  # the request, and how many like it came before


def always(act: Act) -> Says:
    return lambda _seen, _before: act


def in_turn(*acts: Act) -> Says:
    return lambda _seen, before: acts[min(before, len(acts) - 1)]


def drip(piece: bytes) -> Act:
    """A chunk of this every 20 ms, for ever."""

    def send(sock: Any) -> None:
        sock.sendall(HEAD)
        while True:
            sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            _NEVER.wait(0.02)

    return send


def flood(sock: Any) -> None:
    """As much as the other end takes."""
    sock.sendall(HEAD)
    while True:
        sock.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")


@dataclass(frozen=True)
class Liar:
    """What it answers to the submit and to polls, and what must come of that: kind, code and price.

    `first`: of the submit.  `then`: of the poll after it.  `otherwise`: by mode, where one takes it differently.
    """

    name: str
    submit: Says
    first: tuple[OutcomeKind, str, object]
    poll: Says | None = None
    then: tuple[OutcomeKind, str, object] | None = None
    otherwise: dict[str, tuple[OutcomeKind, str, object]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


HEARTBEATS = always(drip(b" "))
UNENDED = always(drip(b'{"a":'))

TAKEN = (OutcomeKind.PENDING, "", HELD)
NONSENSE = (OutcomeKind.RETRY, "bad_answer", Reason.SERVER_ERROR)
UNHEARD = (OutcomeKind.UNKNOWN, "no_answer", HELD)
STILL = (OutcomeKind.PENDING, "bad_answer", HELD)
NOT_TOLD = (OutcomeKind.PENDING, "poll_failed", HELD)

LIARS = [
    Liar("a page instead of a result", always(HTML), NONSENSE),
    Liar("a redirect to a page", always(answer(b"", 302, Location="/login")), NONSENSE),
    Liar("an empty answer", always(answer(b"")), NONSENSE),
    Liar("the answer to another job", always(answer({"status": "success"}, X_Job_Id="job-2")), NONSENSE),
    Liar(
        "a 200 with an error inside",
        always(answer({"status": "error", "error": "out of memory"})),
        (OutcomeKind.RETRY, "job_failed", Reason.SERVER_ERROR),
    ),
    Liar("an error without a word for it", always(answer({"error": "out of memory"})), NONSENSE),
    Liar(
        "a job taken without an id",
        always(answer({"status": "processing"})),
        NONSENSE,
        otherwise={"callback": TAKEN},
    ),
    Liar(
        "an id that is none",
        always(answer({"status": "processing", "job_id": {"id": 1}})),
        NONSENSE,
        otherwise={"callback": TAKEN},
    ),
    Liar("heartbeats for ever", HEARTBEATS, UNHEARD),
    Liar("a result that never ends", UNENDED, UNHEARD),
    Liar("a flood", always(flood), (OutcomeKind.FAILED, "answer_too_large", Reason.INVALID_REQUEST)),
    Liar(
        "a cancel that nobody asked for",
        always(answer({"status": "canceled"})),
        (OutcomeKind.CANCELED, "canceled", Reason.SERVER_ERROR),
    ),
    Liar("a page instead of a status", always(ACCEPTED), TAKEN, always(HTML), STILL),
    Liar(
        "the status of another job",
        always(ACCEPTED),
        TAKEN,
        always(answer({"status": "completed", "job_id": "j2", "result": "not ours"})),
        STILL,
    ),
    Liar("a poll told to slow down", always(ACCEPTED), TAKEN, always(answer({"error": "slow down"}, 429)), NOT_TOLD),
    Liar("a poll told that it is busy", always(ACCEPTED), TAKEN, always(answer({"status": "busy"}, 503)), NOT_TOLD),
    Liar("a poll answered by a gateway", always(ACCEPTED), TAKEN, always(answer(b"<html>", 502)), NOT_TOLD),
    Liar("a page that says 404 to a poll", always(ACCEPTED), TAKEN, always(answer(b"<html>", 404)), NOT_TOLD),
    Liar("heartbeats to a poll", always(ACCEPTED), TAKEN, HEARTBEATS, NOT_TOLD),
    Liar(
        "a status of 200 with an error inside",
        always(ACCEPTED),
        TAKEN,
        always(answer({"status": "failed", "job_id": "j1", "error": "boom"})),
        (OutcomeKind.RETRY, "job_failed", Reason.SERVER_ERROR),
    ),
    Liar(
        "a job that it forgets",
        always(ACCEPTED),
        TAKEN,
        always(answer({"error": "unknown"}, 404)),
        (OutcomeKind.LOST, "not_found", Reason.SERVER_LOST),
    ),
    Liar(
        "a word that nobody knows",
        always(ACCEPTED),
        TAKEN,
        always(answer({"status": "pondering", "job_id": "j1"})),
        STILL,
    ),
]


def price(outcome: Outcome) -> object:
    if outcome.kind in (OutcomeKind.PENDING, OutcomeKind.UNKNOWN):
        return HELD
    return decide(RUN, outcome, ModelConfig(), SETTINGS, 0, canceling=False).reason


def told(outcome: Outcome) -> tuple[OutcomeKind, str, object]:
    return outcome.kind, outcome.code, price(outcome)


@pytest.fixture
def speak(scripted, ours):
    """Makes a server of a liar, spoken to in a mode."""

    def make(says: Callable[[Seen], Act], mode: str = "auto", **parts: Any):
        described = Description.model_validate({"mode": mode, **parts})
        there = scripted(says)
        return ours(there.url + "/generate", described, max_response_bytes=100_000), there

    return make


JOB = Call("job-1", 1, {"prompt": "a cat"}, callback_url="http://me/cb", deadline_s=60)
IN_HASTE = JOB._replace(deadline_s=0.5)
"""Only for what has no end of its own: this process may stand still for longer, as when its garbage is collected."""


def asked(says: Says | None) -> Call:
    return IN_HASTE if says in (HEARTBEATS, UNENDED) else JOB


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("liar", LIARS, ids=str)
def test_a_lie_costs_what_it_should(liar: Liar, mode: str, speak):
    came = {"GET": 0, "POST": 0}

    def act(seen: Seen) -> Act:
        came[seen.method] += 1
        says = liar.submit if seen.method == "POST" or liar.poll is None else liar.poll
        return says(seen, came[seen.method] - 1)

    server, _ = speak(act, mode)
    outcome = server.submit(asked(liar.submit))
    assert told(outcome) == liar.otherwise.get(mode, liar.first)
    if liar.then is not None:
        assert told(server.status(asked(liar.poll), outcome.remote_id)) == liar.then


@pytest.mark.parametrize("mode", MODES)
def test_a_result_that_can_be_read_once_is_read_once(mode: str, speak):
    """Whoever reads it has it; one that dies before it has stored it costs the job a crash, and it runs again."""
    left = [answer({"status": "completed", "job_id": "j1", "result": 7})]
    server, there = speak(
        lambda seen: ACCEPTED if seen.method == "POST" else left.pop() if left else answer({"error": "gone"}, 404), mode
    )
    remote_id = server.submit(JOB).remote_id
    first = server.status(JOB, remote_id)
    assert (first.kind, first.result) == (OutcomeKind.DONE, 7)
    assert len(there.seen) == 2
    assert told(server.status(JOB, remote_id)) == (OutcomeKind.LOST, "not_found", Reason.SERVER_LOST)


def test_a_result_fetched_by_itself_is_asked_for_once(speak):
    says = {"/generate": ACCEPTED, "/status/j1": answer({"status": "completed"}), "/result/j1": answer({"x": 1})}
    server, there = speak(lambda seen: says[seen.path], "async", result={"path": "/result/{{id}}", "result": ""})
    outcome = server.status(JOB, server.submit(JOB).remote_id)
    assert (outcome.kind, outcome.result) == (OutcomeKind.DONE, {"x": 1})
    assert [seen.path for seen in there.seen] == list(says)


@pytest.mark.parametrize("mode", MODES)
def test_a_cancel_that_lies_ends_nothing(mode: str, speak):
    """It says canceled, and the job goes on and completes: polls are believed, and the slot is not freed by a yes."""
    polls = iter([{"status": "processing", "job_id": "j1"}, {"status": "completed", "job_id": "j1", "result": 7}])

    def act(seen: Seen) -> Act:
        if "/cancel/" in seen.path:
            return answer({"status": "canceled", "job_id": "j1"})
        return ACCEPTED if seen.method == "POST" else answer(next(polls))

    server, _ = speak(act, mode)
    remote_id = server.submit(JOB).remote_id
    assert server.cancel(JOB, remote_id) is True
    assert server.status(JOB, remote_id).kind is OutcomeKind.PENDING
    assert server.status(JOB, remote_id).kind is OutcomeKind.DONE
    assert server.description.cancel_frees_slot == "eventual"


@pytest.mark.parametrize("name", presets.names())
def test_no_preset_believes_a_cancel(name: str):
    assert Description.model_validate(presets.get(name)).cancel_frees_slot != "immediate"


def test_a_health_check_that_blocks_is_no_death(speak):
    """Servers whose health waits for a generation step answer after 12 s: they are busy."""
    server, there = speak(lambda _seen: lambda _sock: there.stopped.wait(10), health={"read_s": 0.2})
    started = time.monotonic()
    assert server.health().kind is HealthKind.BUSY
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("said", "kind"),
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
def test_a_health_report_that_makes_no_sense_frees_nothing(said: Act, kind: HealthKind, speak):
    server, _ = speak(lambda _seen: said)
    found = server.health()
    assert (found.kind, found.active_jobs, found.job_ids) == (kind, None, None)


def test_a_server_that_changes_its_answers_under_way_is_believed_at_its_end(speak):
    """Pages, busy answers, other jobs and processing in between say nothing; the last word does."""
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
    server, _ = speak(lambda seen: ACCEPTED if seen.method == "POST" else next(polls))
    remote_id = server.submit(JOB).remote_id
    outcomes = [server.status(JOB, remote_id) for _ in range(6)]
    assert [one.kind for one in outcomes] == [OutcomeKind.PENDING] * 5 + [OutcomeKind.DONE]
    assert outcomes[-1].result == "ours"
