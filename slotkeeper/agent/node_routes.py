"""The routes of the slot protocol as a node serves them: results are signed, and kept on disk."""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import orjson

from slotkeeper import signatures
from slotkeeper.agent.config import AgentConfig
from slotkeeper.agent.identity import AgentIdentity
from slotkeeper.agent.run_journal import JournalFailed, RunFacts, RunJournal, name_of, run_name
from slotkeeper.serve import protocol_responses
from slotkeeper.serve.http_server import Request, Response
from slotkeeper.serve.protocol_routes import BadCall, read_call
from slotkeeper.serve.run_executor import RunExecutor
from slotkeeper.serve.run_scheduler import (
    AlreadyKnown,
    Busy,
    Call,
    Run,
    RunEnd,
    RunScheduler,
    Started,
    State,
)

COMMENT_S = 15.0
"""How often a stream has a comment, so that a dead path is noticed."""
MAX_STREAMED_BYTES = 1 << 20
"""A larger result ends the stream as `processing`, and is fetched by /status."""
_ADMISSION_S = 0.5  # So long a local server may take to say that it does not begin.


class NodeRoutes:
    """The request handler of a node.

    why_not: returns why the owner takes no jobs now; "": jobs are taken.  digest: of the declaration that the gateway
    has confirmed.  started: returns a text that changes when no run of an earlier process can go on.  on_start: is
    given each run that begins, and for how many ms it may go on.
    """

    def __init__(
        self,
        scheduler: RunScheduler,
        executor: RunExecutor,
        journal: RunJournal,
        identity: AgentIdentity,
        config: AgentConfig,
        *,
        why_not: Callable[[], str],
        digest: Callable[[], str],
        started: Callable[[], str],
        on_start: Callable[[Run, int], None],
    ) -> None:
        self._scheduler, self._executor, self._journal = scheduler, executor, journal
        self._config = config
        self.identity = identity
        """Whose key signs results."""
        self._arriving, self._lock = Counter[str](), threading.Lock()
        self._why_not, self._digest, self._started, self._on_start = why_not, digest, started, on_start

    def note_arrival(self, request: Request) -> None:
        """Note that a request for a run has arrived, before `handle` is called in some thread.

        Until then no run exists, and a poll must not get the answer that the request was never received.
        """
        if request.path == "/run":
            with self._lock:
                self._arriving[_name_in(request)] += 1

    def handle(self, request: Request) -> Response:
        """Return the response to a request that came through the gateway."""
        path = request.path
        if path == "/run" and request.method == "POST":
            try:
                return self._run(request)
            finally:
                with self._lock:
                    self._arriving[_name_in(request)] -= 1
                    self._arriving += Counter()  # without those that are not arriving
        if path == "/health" and request.method == "GET":
            return self._health()
        if path.startswith("/status/") and request.method == "GET":
            return self._status(path.split("/", 2)[2], request.headers)
        if path.startswith("/cancel/") and request.method == "POST":
            return self._cancel(path.split("/", 2)[2])
        return protocol_responses.answer(404, {"status": "failed", "error": "there is no such path here"})

    # -- runs ------------------------------------------------------------------------------------------------

    def _run(self, request: Request) -> Response:
        model = request.headers.get("x-model", "")
        if (refusal := self._refuse(request, model)) is not None:
            return refusal
        try:
            call = read_call(request, push=False)
        except BadCall as error:
            return protocol_responses.refused(422, str(error))
        if not call.job_id or call.attempt is None:
            return protocol_responses.refused(422, "X-Job-Id and X-Attempt are needed")
        name = run_name(call.job_id, call.attempt)
        call = Call(call.payload, True, call.job_id, call.attempt, call.key, model=model)
        match self._scheduler.submit(call):
            case Started(run):
                return self._start(run, request, call)
            case AlreadyKnown(run):
                self._add_name(run, name)
                return self._stream(run, name, call.attempt)
            case Busy():
                return protocol_responses.not_now("busy", "no slot is free", self._scheduler.health())
            case _:
                return protocol_responses.not_now("busy", "the agent is stopping", self._scheduler.health())

    def _refuse(self, request: Request, model: str) -> Response | None:
        """Return why this node does not take a job now; None: it does."""
        if model not in self._config.models:
            return _not_here("node", f"this node does not serve {model!r}")
        if request.headers.get("x-node-declaration", "") != self._digest():
            return _not_here("node", "the node declares something else by now")
        if why := self._why_not():
            return _not_here("node", why)
        if len(request.body) > self._config.max_payload_bytes:
            return _not_here("job", f"the payload is larger than {self._config.max_payload_bytes >> 20} MiB")
        return None

    def _start(self, run: Run, request: Request, call: Call) -> Response:
        is_forwarded = self._config.models[run.model].forward is not None
        facts = RunFacts(
            run.id,
            run.job_id,
            run.attempt or 0,
            call.key,
            run.model,
            hashlib.sha256(request.body).hexdigest(),
            is_forwarded,
            self._journal.now_ms(),
        )
        try:
            self._journal.begin(facts)
        except JournalFailed as error:  # It could not be found again, so it must not begin.
            self._scheduler.finish(run, RunEnd(State.CANCELED, error="the journal cannot be written"))
            return _not_here("node", f"the journal cannot be written: {error}")
        self._scheduler.add_name(run, facts.name)
        deadline_ms = request.headers.get("x-deadline-ms", "")
        if deadline_ms.isdigit():
            self._on_start(run, int(deadline_ms))
        self._executor.start(run)
        if is_forwarded and run.done.wait(_ADMISSION_S) and run.ending and not run.ending.was_started:
            return _not_here("node", run.ending.error)
        return self._stream(run, facts.name, run.attempt)

    def _add_name(self, run: Run, name: str) -> None:
        """Let a run be found under the id of a later attempt."""
        if name != name_of(run):
            with suppress(JournalFailed):  # It is found until the agent is restarted.
                self._journal.add_name(run, name)
        self._scheduler.add_name(run, name)

    def _stream(self, run: Run, name: str, attempt: int | None) -> Response:
        return Response(200, b"", events=self._events(run, name, attempt))

    def _events(self, run: Run, name: str, attempt: int | None) -> Iterator[bytes]:
        sent, has_ended = 0, False
        while not has_ended:
            new, has_ended = run.pieces.wait_for_more(sent, COMMENT_S)
            if not new and not has_ended:
                yield b": still running\n\n"
            for message in new:
                yield b"data: %b\n\n" % message
            sent += len(new)
        run.done.wait()
        ending = run.ending
        if ending is not None and len(ending.result) > MAX_STREAMED_BYTES:
            yield b"data: %b\n\n" % orjson.dumps({"status": State.PROCESSING, "job_id": name})
            return
        yield b"data: %b\n\n" % orjson.dumps(self._body(run, name, attempt))

    def _status(self, name: str, headers: Mapping[str, str]) -> Response:
        run = self._find(name)
        if run is None:
            return self._unknown(name)
        attempt = headers.get("x-attempt", "")
        return protocol_responses.answer(200, self._body(run, name, int(attempt) if attempt.isdigit() else None))

    def _find(self, name: str) -> Run | None:
        """Return a run by the name that the dispatcher gave it, from memory or from the disk."""
        if (run := self._scheduler.find(name)) is not None:
            return run
        stored = self._journal.find(name)
        if stored is None:
            return None
        if stored.ending is None:  # It may be a run of an earlier process, under the name of a later attempt.
            return self._scheduler.find(stored.facts.name)
        run = run_from_facts(stored.facts)
        run.ending, run.state = stored.ending, stored.ending.state
        run.pieces.end()
        run.done.set()
        return run

    def _unknown(self, name: str) -> Response:
        body: dict[str, Any] = {"status": "unknown", "job_id": name, "error": "no such run here"}
        with self._lock:
            if self._arriving[name]:
                return protocol_responses.answer(200, {"status": State.PROCESSING, "job_id": name})
        body["died" if self._journal.has(name) else "never_received"] = True
        return protocol_responses.answer(404, body)

    def _cancel(self, name: str) -> Response:
        run = self._scheduler.cancel(name)
        if run is None:
            return self._unknown(name)
        status = "canceling" if run.state is State.PROCESSING else run.state
        return protocol_responses.answer(200, {"status": status, "job_id": name})

    def _health(self) -> Response:
        about: dict[str, str | bool] = {"started": self._started(), "model": "", "mode": "async", "streams": True}
        return protocol_responses.health(self._scheduler.health(), about | {"endpoint": "/run"})

    # -- the state of a run -------------------------------------------------------------------------------

    def _body(self, run: Run, name: str, attempt: int | None) -> dict[str, Any]:
        """Return the body of /status, which also ends a stream."""
        body: dict[str, Any] = protocol_responses.status_body(run) | {"job_id": name}
        if run.ending is not None and run.ending.state is State.COMPLETED:
            body["envelope"] = self._sign(run, run.ending, attempt)
        return body

    def _sign(self, run: Run, ending: RunEnd, attempt: int | None) -> dict[str, Any]:
        """Sign the result for the attempt that asks: a later one may get the result of a finished run."""
        stored = self._journal.find_facts(run)
        facts, ended_ms = (None, self._journal.now_ms()) if stored is None else stored
        asking = run.attempt if attempt is None else attempt
        statement = signatures.RunStatement(
            job=run.job_id,
            attempt=asking or 0,
            run_attempt=run.attempt or 0,
            model=run.model,
            model_version=self._version_of(run.model),
            node=self.identity.id,
            declaration=self._digest(),
            payload_sha256="" if facts is None else facts.payload_sha256,
            result_sha256=hashlib.sha256(ending.result).hexdigest(),
            started_ms=0 if facts is None else facts.started_ms,
            ended_ms=ended_ms,
        )
        return signatures.sign_envelope(statement.encode(), self.identity.key)

    def _version_of(self, model: str) -> str:
        entry = self._config.models.get(model)
        return (entry.version or "") if entry is not None else ""


def _name_in(request: Request) -> str:
    """Return the name of the run that a request is for."""
    return run_name(request.headers.get("x-job-id", ""), request.headers.get("x-attempt", ""))


def run_from_facts(facts: RunFacts) -> Run:
    """Return a run of an earlier process, without its end."""
    key = None if facts.key is None else (True, facts.key)
    run = Run(facts.id, facts.job_id, None, True, facts.attempt, key, model=facts.model)
    run.names.append(facts.name)
    return run


def _not_here(scope: str, why: str) -> Response:
    return protocol_responses.answer(409, {"error": f"not here: {why}", "code": "not_here", "scope": scope})
