"""What a node returns counts only if it is validly signed for this run."""

import asyncio
import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from routing.dispatch.outcome import Outcome, OutcomeKind, StopReason
from slotkeeper import json_text, large_json, signatures
from slotkeeper.jobs.values import QueuedJob, Run
from slotkeeper.registry.values import NodeIdentity
from slotkeeper.signatures import RunStatement
from tasks.worker.node_results import BAD_SIGNATURE, NodeResults

_KEY, _OTHER_KEY = signatures.make_key(), signatures.make_key()
_KEY_ID = signatures.key_id(signatures.public_key_of(_KEY))
_PAYLOAD, _RESULT = '{"prompt": "a cat"}', b'{"n": -0.0, "text": "\\u00e9"}'
_JOB = QueuedJob("j1", 1, "zimg", 5, "acme", 0, None, 0)
_RUN = Run(_JOB, _PAYLOAD, 2, 0, 0, None, None, None, "attic", "attic-slot0", 0, False)
_HONEST = RunStatement(
    job="j1",
    attempt=2,
    run_attempt=1,
    model="zimg",
    model_version="",
    node="n_1",
    declaration="d",
    payload_sha256=hashlib.sha256(_PAYLOAD.encode()).hexdigest(),
    result_sha256=hashlib.sha256(_RESULT).hexdigest(),
    started_ms=1,
    ended_ms=2,
)


class Worker:
    """The parts that NodeResults uses: a catalog with one node, and a loop whose threads are this one."""

    def __init__(self) -> None:
        public = signatures.public_key_of(_KEY)
        self.node: NodeIdentity | None = NodeIdentity("n_1", {_KEY_ID: public}, False, "acme")
        self.frozen = list[str]()
        self.largest: int | None = None

    @property
    def catalog(self) -> Any:
        servers = {"attic": SimpleNamespace(node=self.node)}
        cached = SimpleNamespace(servers=servers, limits_of=lambda _: SimpleNamespace(max_result_bytes=self.largest))
        return SimpleNamespace(cached=lambda: cached, refresh=lambda: cached)

    async def run_in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def verify(self, outcome: Outcome) -> Outcome | StopReason:
        results = NodeResults(self, self)  # type: ignore[arg-type]
        results._freeze = lambda _run, why: self.frozen.append(why)  # type: ignore[method-assign]
        return asyncio.run(results.verify(_RUN, outcome))


def _done(statement: RunStatement = _HONEST, key: Any = _KEY, result: bytes = _RESULT, **envelope: Any) -> Outcome:
    signed = signatures.sign_envelope(statement.encode(), key) | envelope
    return Outcome(OutcomeKind.DONE, result=json_text.RawJson(result, large_json.get_member), envelope=signed)


def test_a_signed_result_has_its_envelope_and_stays_as_it_was_sent() -> None:
    worker = Worker()
    verified = worker.verify(_done())
    assert isinstance(verified, Outcome) and verified.kind is OutcomeKind.DONE and not worker.frozen
    assert verified.result.text == _RESULT and verified.envelope.node == "n_1"
    assert signatures.verify_envelope(orjson.loads(verified.envelope.envelope), worker.node.keys)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "outcome",
    [
        _done(key=_OTHER_KEY),
        _done(signatures=[{"keyid": _KEY_ID, "sig": signatures.encode_bytes(bytes(64))}]),
        _done(_HONEST._replace(job="j2")),
        _done(_HONEST._replace(attempt=1)),
        _done(_HONEST._replace(model="other")),
        _done(_HONEST._replace(node="n_2")),
        _done(_HONEST._replace(payload_sha256=hashlib.sha256(b"{}").hexdigest())),
        _done(result=b'{"n": 0}'),
        _done(payloadType="application/json"),
        _done(signatures=[]),
        _done()._replace(envelope=None),
    ],
    ids=["key", "signature", "job", "attempt", "model", "node", "payload", "result", "type", "unsigned", "none"],
)
def test_a_result_that_is_not_signed_for_this_run_costs_the_job_nothing_and_freezes_the_node(outcome: Outcome) -> None:
    worker = Worker()
    verified = worker.verify(outcome)
    assert isinstance(verified, Outcome)
    assert (verified.kind, verified.code, verified.result) == (OutcomeKind.UNREACHABLE, BAD_SIGNATURE, None)
    assert len(worker.frozen) == 1


def test_the_result_of_a_revoked_node_does_not_count() -> None:
    worker = Worker()
    worker.node = None
    verified = worker.verify(_done())
    assert isinstance(verified, Outcome) and verified.code == BAD_SIGNATURE and not worker.frozen
