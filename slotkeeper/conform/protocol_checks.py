"""The checks of `slotkeeper conform`, each a function that tests one clause of the slot protocol.

To add a check, write a function in this file, and put its name behind the clause in docs/reference/slot-protocol.md.
A test compares the file and the page.
"""

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import requests

from slotkeeper.conform.check_context import (
    CheckContext,
    Skipped,
    a_job_id,
    is_stream,
    last_event,
    require,
    require_equal,
    wait_until,
)

Level = Literal["MUST", "SHOULD"]


@dataclass(frozen=True, slots=True)
class Check:
    """A check: the section and level of its clause, and the clause as one sentence, which the command prints."""

    name: str
    section: str
    level: Level
    says: str
    act: Callable[[CheckContext], None]


CHECKS: list[Check] = []


def check(
    section: str, level: Level = "MUST"
) -> Callable[[Callable[[CheckContext], None]], Callable[[CheckContext], None]]:
    """Add a function to CHECKS.  The command prints its docstring as the clause."""

    def add(act: Callable[[CheckContext], None]) -> Callable[[CheckContext], None]:
        says = " ".join((act.__doc__ or "").split())
        CHECKS.append(Check(act.__name__.replace("_", "-"), section, level, says, act))
        return act

    return add


# -- Answers ---------------------------------------------------------------------------------------------------


@check("Answers")
def result_of_the_function(context: CheckContext) -> None:
    """A call is answered with the function's result."""
    answer = context.served.dispatch({"prompt": "a cat"})
    require_equal(answer.status_code, 200, "the status of the answer")
    ended = context.served.outcome(answer)
    require_equal(
        (ended["status"], ended["result"]), ("completed", {"echo": {"prompt": "a cat"}}), "the end of the run"
    )


@check("Answers")
def first_answer_of_the_mode(context: CheckContext) -> None:
    """The first answer is that of the mode: sync the result, async an id, stream events with the result in the last."""
    answer = context.served.dispatch({"prompt": "a cat"})
    if context.served.mode == "stream":
        require(is_stream(answer), "the answer is no text/event-stream")
        require_equal(last_event(answer)["status"], "completed", "the word of the last event")
        return
    body = answer.json()
    if context.served.mode == "sync":
        require_equal(body, {"status": "success", "result": {"echo": {"prompt": "a cat"}}}, "the answer")
    else:
        require_equal(body["status"], "processing", "the word of the answer")
        require(body["job_id"], "the answer has no job_id")


@check("Answers")
def error_of_the_function(context: CheckContext) -> None:
    """A run that ends with an error may be tried again."""
    answer = context.served.dispatch({"fail": "error"})
    require_equal(answer.status_code, 500 if context.served.mode == "sync" else 200, "the status of the answer")
    ended = context.served.outcome(answer)
    require_equal((ended["status"], ended.get("retryable", True)), ("failed", True), "status and retryable")
    require(ended["error"], "the answer has no error")


@check("Answers")
def wrong_request(context: CheckContext) -> None:
    """A wrong request is final."""
    answer = context.served.dispatch({"fail": "invalid"})
    require_equal(answer.status_code, 422 if context.served.mode == "sync" else 200, "the status of the answer")
    ended = context.served.outcome(answer)
    require_equal((ended["status"], ended["retryable"]), ("failed", False), "status and retryable")
    require(ended["error"], "the answer has no error")


@check("Answers")
def no_json(context: CheckContext) -> None:
    """A body that is no JSON is refused, in JSON, and shows nothing of the code."""
    for body in (b"", b"{", b"no JSON", b"\xff\xfe"):
        answer = context.served.post(body)
        require(400 <= answer.status_code < 500, f"{body!r} is answered {answer.status_code}")
        require(answer.json()["error"], f"the answer to {body!r} has no error")
        require("Traceback" not in answer.text, f"the answer to {body!r} shows a traceback")


@check("Answers")
def refused_body_takes_no_slot(context: CheckContext) -> None:
    """A refused body takes no slot."""
    context.served.post(b"{")
    require_equal(context.served.health()["active_jobs"], 0, "active_jobs")


# -- Who gets a slot -------------------------------------------------------------------------------------------


@check("Who gets a slot")
def no_more_than_slots(context: CheckContext) -> None:
    """As many run at once as there are slots, and not one more."""
    runs = context.fill()
    answer = context.served.dispatch(context.payload())
    require_equal(answer.status_code, 503, "the status of one call more than there are slots")
    require(context.gate.nobody_waits(), "one run more than there are slots began")
    require_equal(context.served.health()["active_jobs"], len(runs), "active_jobs")


@check("Who gets a slot")
def busy_when_full(context: CheckContext) -> None:
    """A full server answers the dispatcher at once with busy and a time to retry."""
    context.fill()
    started = time.monotonic()
    answer = context.served.dispatch(context.payload())
    took_s = time.monotonic() - started
    require_equal((answer.status_code, answer.json()["status"]), (503, "busy"), "the answer of a full server")
    require(int(answer.headers.get("Retry-After", 0)) >= 1, "there is no Retry-After of at least a second")
    require(took_s < 2, f"it took {took_s:.1f} s to say so: the job waited inside")


@check("Who gets a slot")
def slot_serves_again(context: CheckContext) -> None:
    """A slot serves again after each way to end."""
    for how in ("return", "error", "invalid"):
        for run in context.fill():
            run.finish(how)
    require_equal(context.served.health()["active_jobs"], 0, "active_jobs")
    require_equal(context.begin().finish()["status"], "completed", "the next run's end")


@check("Who gets a slot")
def direct_call_runs_at_once(context: CheckContext) -> None:
    """A direct call runs at once when a slot is free."""
    context.served.needs("direct")
    require_equal(context.begin_direct().finish()["status"], "completed", "its end")


@check("Who gets a slot")
def direct_call_waits(context: CheckContext) -> None:
    """A direct call to a full server waits, and its answer has its position."""
    context.served.needs("direct")
    context.fill()
    answers = [context.served.generate(context.payload()) for _ in range(2)]
    require_equal([answer.status_code for answer in answers], [200, 200], "the status of both answers")
    require_equal([answer.json()["status"] for answer in answers], ["queued", "queued"], "their word")
    require_equal([answer.json()["position"] for answer in answers], [1, 2], "their position")
    require_equal(context.served.status(answers[1].json()["job_id"]).json()["position"], 2, "the position in /status")


@check("Who gets a slot")
def direct_queue_is_bounded(context: CheckContext) -> None:
    """At most so many direct calls wait; the next is refused."""
    context.served.needs("direct")
    context.fill()
    for _ in range(context.served.max_direct_queue):
        context.queue()
    answer = context.served.generate(context.payload())
    require_equal((answer.status_code, answer.json()["error"]), (503, "Queue full"), "the answer to one more")
    require_equal(context.served.health()["direct_queue"], context.served.max_direct_queue, "direct_queue")


@check("Who gets a slot")
def direct_calls_in_order(context: CheckContext) -> None:
    """Direct calls run in the order in which they came."""
    context.served.needs("direct")
    running = context.fill()
    names = ("first", "second", "third")
    waiting = [context.queue(name) for name in names]
    running[0].finish()
    for name, job_id in zip(names, waiting, strict=True):
        held = context.gate.arrival()
        require_equal(held.name, name, "the next to run")
        held.release()
        require_equal(context.served.ended(job_id)["result"]["echo"]["name"], name, "whose result its id has")


@check("Who gets a slot")
def direct_queue_first(context: CheckContext) -> None:
    """The direct queue drains before dispatcher traffic gets a slot, at every moment until its last call has begun."""
    context.served.needs("direct")
    running = context.fill()
    waiting = [context.queue(name) for name in ("first", "second")]
    running[0].finish()
    for name in ("first", "second"):
        held = context.gate.arrival()
        require_equal(held.name, name, "the next to run")
        require_equal(
            context.served.dispatch(context.payload("dispatcher")).status_code, 503, "the answer to the dispatcher"
        )
        held.release()
    context.served.ended(waiting[1])
    require_equal(context.begin().finish()["status"], "completed", "the dispatcher's run afterwards")


# -- Status ----------------------------------------------------------------------------------------------------


@check("Status")
def processing_until_the_end(context: CheckContext) -> None:
    """An async run is processing until it ends."""
    if context.served.mode != "async":
        raise Skipped("async only")
    run = context.begin()
    job_id = run.answer.result(10).json()["job_id"]
    require_equal(context.served.word(job_id), "processing", "its status")
    run.finish()
    require(context.served.ended(job_id)["status"] in ("success", "completed", "done"), "it has not ended well")


@check("Status")
def unknown_id(context: CheckContext) -> None:
    """An unknown id is not found."""
    answer = context.served.status("nobody-has-this-id")
    require_equal((answer.status_code, answer.json()["status"]), (404, "unknown"), "the answer")


@check("Status")
def reading_destroys_nothing(context: CheckContext) -> None:
    """A result can be read again: its reader may die before it has saved it."""
    if context.served.mode != "async":
        raise Skipped("async only")
    job_id = context.served.dispatch({"prompt": "a cat"}).json()["job_id"]
    require_equal(
        context.served.ended(job_id), context.served.status(job_id).json(), "the first reading, against the second,"
    )


# -- Health ----------------------------------------------------------------------------------------------------


@check("Health")
def health_counts_what_runs(context: CheckContext) -> None:
    """Health counts the runs that run."""
    runs = context.fill()
    require_equal(context.served.health()["active_jobs"], len(runs), "active_jobs")


@check("Health", "SHOULD")
def health_names_what_runs(context: CheckContext) -> None:
    """Health names each run by the dispatcher's id."""
    context.served.needs("ids")
    runs = context.fill()
    require_equal(sorted(context.served.health()["job_ids"]), sorted(run.job for run in runs), "job_ids")


@check("Health")
def health_counts_none_that_waits(context: CheckContext) -> None:
    """Health counts no job that only waits."""
    context.served.needs("direct")
    runs = context.fill()
    job_id = context.queue()
    now = context.served.health()
    require_equal((now["active_jobs"], now["direct_queue"]), (len(runs), 1), "active_jobs and direct_queue")
    require(job_id not in now.get("job_ids", ()), "job_ids has a call that waits")


@check("Health")
def health_answers_when_full(context: CheckContext) -> None:
    """Health answers within a second while every slot runs and calls wait."""
    context.fill()
    for _ in range(context.served.max_direct_queue if "direct" not in context.served.without else 0):
        context.queue()
    for _ in range(20):
        context.served.health(timeout_s=1)


@check("Health")
def gone_when_its_end_is_known(context: CheckContext) -> None:
    """A run is gone from health when its caller knows its end."""
    run = context.begin()
    run.finish()
    now = context.served.health()
    require(now["active_jobs"] == 0 and run.job not in now.get("job_ids", ()), "health still counts it")


@check("Health")
def caller_that_hangs_up(context: CheckContext) -> None:
    """A run is counted until it has really ended, also when its caller has gone; then its slot comes back."""
    served, connection = context.served, context.served.connect()
    headers = {"X-Source": "dispatcher", "X-Job-Id": a_job_id(), "X-Attempt": "1"}
    served.begin_request(connection, "POST", served.endpoint, json.dumps(context.payload()), **headers)
    held = context.gate.arrival()
    connection.close()
    require(context.served.health()["active_jobs"] <= 1, "more runs are counted than there are")
    held.release()
    wait_until(lambda: context.served.health()["active_jobs"] == 0, "the slot's return")


# -- Cancel ----------------------------------------------------------------------------------------------------


@check("Cancel", "SHOULD")
def cancel_of_an_unknown_id(context: CheckContext) -> None:
    """To cancel an unknown id is not found."""
    context.served.needs("cancel")
    answer = context.served.cancel("nobody-has-this-id")
    require_equal((answer.status_code, answer.json()["status"]), (404, "unknown"), "the answer")


@check("Cancel", "SHOULD")
def cancel_of_what_waits(context: CheckContext) -> None:
    """A direct call that waits is dropped by a cancel."""
    context.served.needs("cancel")
    context.served.needs("direct")
    running = context.fill()
    first, second = context.queue("first"), context.queue("second")
    require_equal(context.served.cancel(first).json()["status"], "canceled", "the answer")
    require_equal(context.served.health()["direct_queue"], 1, "direct_queue")
    require_equal(context.served.word(first), "canceled", "its status")
    running[0].finish()
    require_equal(context.gate.arrival().name, "second", "the next to run")
    require_equal(context.served.word(second), "processing", "its status")


@check("Cancel")
def cancel_of_what_runs(context: CheckContext) -> None:
    """A canceled run ends, and the answer is not `canceled` before the run has ended."""
    context.served.needs("cancel")
    for suffix in ("", ".1") if "ids" not in context.served.without else ("",):
        run = context.begin()
        status = context.served.cancel(run.job + suffix).json()["status"]
        require(status in ("canceling", "canceled"), f"the answer is {status!r}")
        if status == "canceled":
            require(run.job not in context.served.health().get("job_ids", ()), "canceled was said of a run that runs")
        require_equal(run.outcome()["status"], "canceled", "its end")
        require(run.job not in context.served.health().get("job_ids", ()), "health still names it")


@check("Cancel", "SHOULD")
def cancel_of_what_has_ended(context: CheckContext) -> None:
    """A cancel changes nothing about a run that has ended."""
    context.served.needs("cancel")
    context.served.needs("ids")
    run = context.begin()
    run.finish()
    require_equal(context.served.cancel(run.job).json()["status"], "completed", "the answer")
    require_equal(context.served.word(run.job), "completed", "its status")


# -- The same work twice ---------------------------------------------------------------------------------------


@check("The same work twice", "SHOULD")
def found_by_job_and_attempt(context: CheckContext) -> None:
    """A run is found by job and attempt: a dispatcher that died before it saved the server's id asks for these."""
    context.served.needs("ids")
    run = context.begin(attempt=3)
    require_equal(context.served.word(f"{run.job}.3"), "processing", "its status")
    run.finish()
    require_equal(context.served.ended(f"{run.job}.3")["result"]["echo"]["name"], run.job, "whose result it has")


@check("The same work twice", "SHOULD")
def bare_id_finds_the_newest(context: CheckContext) -> None:
    """The dispatcher's own id finds the newest attempt."""
    context.served.needs("ids")
    job = a_job_id()
    context.begin(job, attempt=1).finish("error")
    require_equal(context.served.word(job), "failed", "its status after the first attempt")
    context.begin(job, attempt=2).finish()
    require_equal(context.served.word(job), "completed", "its status after the second")
    require_equal(context.served.word(f"{job}.1"), "failed", "the first attempt's")


@check("The same work twice", "SHOULD")
def completed_key_is_answered_again(context: CheckContext) -> None:
    """A key that has completed is answered from memory, without another run."""
    context.served.needs("idempotency")
    job = a_job_id()
    first = context.begin(job, key=job).finish()
    again = context.served.outcome(context.served.dispatch(context.payload(), job, attempt=2, key=job))
    require_equal(again["result"], first["result"], "the second answer's result")
    require(context.gate.nobody_waits(), "it ran again")


@check("The same work twice", "SHOULD")
def running_key_is_joined(context: CheckContext) -> None:
    """A key that is still running is joined, and takes no second slot."""
    context.served.needs("idempotency")
    job = a_job_id()
    run = context.begin(job, key=job)
    joined = context.later(lambda: context.served.dispatch(context.payload(), job, attempt=2, key=job))
    if context.served.mode == "async":
        ids = [answer.result(10).json()["job_id"] for answer in (joined, run.answer)]
        require_equal(ids[0], ids[1], "the id of the run that was joined")
    require_equal(context.served.health()["active_jobs"], 1, "active_jobs")
    first = run.finish()
    require_equal(context.served.outcome(joined.result(10))["result"], first["result"], "the second answer's result")
    require(context.gate.nobody_waits(), "it ran again")


@check("The same work twice", "SHOULD")
def running_key_is_joined_when_full(context: CheckContext) -> None:
    """The call joins its run also when every slot is taken: after "busy" the dispatcher would use another server."""
    context.served.needs("idempotency")
    job = a_job_id()
    run = context.begin(job, key=job)
    for _ in range(context.served.slots - 1):
        context.begin()
    joined = context.later(lambda: context.served.dispatch(context.payload(), job, attempt=2, key=job))
    first = run.finish()
    answer = joined.result(10)
    require_equal(answer.status_code, 200, "the status of the second answer")
    require_equal(context.served.outcome(answer)["result"], first["result"], "its result")


@check("The same work twice", "SHOULD")
def failed_run_is_not_remembered(context: CheckContext) -> None:
    """A run that failed is not remembered by its key: a retry runs again."""
    context.served.needs("idempotency")
    for how in ("error", "invalid"):
        job = a_job_id()
        require_equal(context.begin(job, attempt=1, key=job).finish(how)["status"], "failed", "the first attempt's end")
        require_equal(context.begin(job, attempt=2, key=job).finish()["status"], "completed", "the second's")


@check("The same work twice")
def restart_forgets_what_ran(context: CheckContext) -> None:
    """After a restart health counts no run, and no earlier run is reported as running."""
    if context.served.restart is None:
        raise Skipped("nobody says how this server is started again")
    run = context.begin()
    run.answer.add_done_callback(lambda _: None)
    context.served.restart()
    wait_until(lambda: _is_up(context), "the server's return")
    require_equal(context.served.health()["active_jobs"], 0, "active_jobs after the restart")
    answer = context.served.status(run.job)
    require(answer.status_code == 404 or answer.json()["status"] != "processing", "/status says that it still runs")
    require_equal(context.begin().finish()["status"], "completed", "the next run's end")


# -- Connections -----------------------------------------------------------------------------------------------


@check("Connections", "SHOULD")
def connection_serves_many_calls(context: CheckContext) -> None:
    """A connection serves many calls without delay (an answer in two packets without TCP_NODELAY costs 40 ms)."""
    with closing(context.served.connect()) as connection:
        context.served.begin_request(connection, "GET", "/health")
        connection.getresponse().read()
        sock, started = connection.sock, time.monotonic()
        for _ in range(50):
            context.served.begin_request(connection, "GET", "/health")
            json.loads(connection.getresponse().read())
            require(connection.sock is sock, "it was closed")
        took_s = time.monotonic() - started
    require(took_s < 1.5, f"50 calls took {took_s:.1f} s")


def _is_up(context: CheckContext) -> bool:
    try:
        return bool(context.served.health())
    except requests.RequestException:
        return False
