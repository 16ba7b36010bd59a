"""What a node returns, before it counts: results must be signed for this run, and a refusal needs a second node.

A node can end no job alone: a result that is not validly signed costs the job nothing and freezes the node, and "the
request is wrong" is a retry until another node says the same.
"""

import hashlib
from contextlib import suppress

import structlog
from redis.exceptions import RedisError

from routing.dispatch.dispatcher import Dispatcher
from routing.dispatch.outcome import BAD_ANSWER, STREAM_UNENDED, Outcome, OutcomeKind, StopReason
from routing.maintenance.rebuild import refresh_fleet
from routing.queries.job_timeline import attempts_of
from slotkeeper import json_text
from slotkeeper.clock import now_ms
from slotkeeper.errors import NotFound
from slotkeeper.jobs.values import Run, SignedResult
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.values import AdminState, NodeIdentity, Server
from slotkeeper.signatures import BadEnvelope, RunStatement, verify_envelope
from tasks.servers.node_description import REFUSED_BY_NODE
from tasks.worker.event_loop import WorkerLoop

log = structlog.get_logger(__name__)

BAD_SIGNATURE = "bad_signature"
"""Code of an outcome: the result of a node is not validly signed."""
_MAX_REFUSALS = 3
_FINAL_IF_REPEATED = frozenset({BAD_ANSWER, STREAM_UNENDED})
_HASHED_HERE_BYTES = 1 << 20  # Hashing more would delay the other runs of the worker.


class NodeResults:
    """Verifies the outcomes of runs on nodes.  For the event loop of a worker."""

    def __init__(self, dispatcher: Dispatcher, worker_loop: WorkerLoop) -> None:
        self._dispatcher, self._worker_loop = dispatcher, worker_loop

    async def verify(self, run: Run, outcome: Outcome | StopReason) -> Outcome | StopReason:
        """Return the outcome as it counts; a result has its verified envelope.  Raises DatabaseUnavailable."""
        if isinstance(outcome, StopReason):
            return outcome
        if outcome.kind is OutcomeKind.FAILED or outcome.code == REFUSED_BY_NODE:
            return await self._worker_loop.run_in_thread(self._confirm_refusal, run, outcome)
        if outcome.code in _FINAL_IF_REPEATED:  # One node can send the same nonsense twice.
            return outcome._replace(code=f"{outcome.code}_of_node")
        if outcome.kind is not OutcomeKind.DONE:
            return outcome
        result = outcome.result
        is_large = isinstance(result, json_text.RawJson) and result.size > _HASHED_HERE_BYTES
        verified: Outcome | None = None
        with suppress(BadEnvelope):  # The key may be newer than this process' copy of the catalog.
            verified = None if is_large else self._verify(run, outcome)
        if verified is None:
            verified = await self._worker_loop.run_in_thread(self._verify_or_freeze, run, outcome)
        if verified.kind is OutcomeKind.DONE and (too_large := self._find_excess(run, outcome)):
            return await self._worker_loop.run_in_thread(self._confirm_refusal, run, too_large)
        return verified

    def _verify(self, run: Run, outcome: Outcome) -> Outcome:
        """Return the outcome with its verified envelope.  Raises BadEnvelope."""
        identity = self._identity_of(run)
        if identity is None:
            raise BadEnvelope("the node was revoked")
        verified = verify_envelope(outcome.envelope, identity.keys)
        statement = RunStatement.decode(verified.statement)
        _check(statement, run, identity)
        if not isinstance(outcome.result, json_text.RawJson):
            raise BadEnvelope("there is no result")
        if statement.result_sha256 != hashlib.sha256(outcome.result.text).hexdigest():
            raise BadEnvelope("it is about another result")
        envelope = {name: outcome.envelope[name] for name in ("payloadType", "payload", "signatures")}
        signed = SignedResult(identity.id, verified.key_id, json_text.dumps(envelope).decode())
        return outcome._replace(envelope=signed)

    def _verify_or_freeze(self, run: Run, outcome: Outcome) -> Outcome:
        """Verify with the newest keys; if that fails, freeze the node.  In a thread."""
        self._dispatcher.catalog.refresh()
        try:
            return self._verify(run, outcome)
        except BadEnvelope as bad:
            message = f"The result of node {run.server!r} is not validly signed: {bad}."
            log.error("bad_signature", job_id=run.job.id, server=run.server, why=str(bad))
            if self._identity_of(run) is not None:
                self._freeze(run, str(bad))
            return Outcome(OutcomeKind.UNREACHABLE, code=BAD_SIGNATURE, message=message)

    def _freeze(self, run: Run, why: str) -> None:
        reason = f"{BAD_SIGNATURE}: {why} (job {run.job.id}, attempt {run.attempt})"
        try:
            Catalog(self._dispatcher.store.database).set_server_state(
                run.server, AdminState.FROZEN, reason=reason, by="slotkeeper", now_ms=now_ms()
            )
            refresh_fleet(self._dispatcher, self._dispatcher.catalog.refresh().servers[run.server].fleet)
        except (NotFound, KeyError):  # It was removed in this moment.
            pass
        except RedisError as error:
            log.warning("freeze_postponed", server=run.server, error=str(error))

    def _find_excess(self, run: Run, outcome: Outcome) -> Outcome | None:
        """Return a failed outcome if the result is larger than its tenant may have, or None."""
        limit = self._dispatcher.catalog.cached().limits_of(run.job.tenant).max_result_bytes
        if limit is None or outcome.result.size <= limit:
            return None
        message = f"The result has {outcome.result.size} bytes, and its tenant may have {limit}."
        return Outcome(OutcomeKind.FAILED, code="result_too_large", message=message)

    def _confirm_refusal(self, run: Run, outcome: Outcome) -> Outcome:
        """Return the outcome of a run that its node calls final: so if it is trusted, or not the first to do so."""
        identity = self._identity_of(run)
        if (identity is not None and identity.is_trusted) or self._was_refused_before(run, identity):
            return outcome._replace(kind=OutcomeKind.FAILED)
        return outcome._replace(kind=OutcomeKind.RETRY, code=REFUSED_BY_NODE)

    def _was_refused_before(self, run: Run, identity: NodeIdentity | None) -> bool:
        """Return whether a node of another owner has refused the job, or so many runs were that this is the last."""
        attempts = attempts_of(self._dispatcher.store.list_events(run.job.id))
        refused = (one for one in attempts if one.error is not None and one.error["code"] == REFUSED_BY_NODE)
        refusing = [one.server or "" for one in refused]
        servers = self._dispatcher.catalog.cached().servers
        owners = {node.owner for name in refusing if name in servers and (node := servers[name].node) is not None}
        is_shared = identity is not None and bool(owners - {identity.owner})
        return is_shared or len(refusing) + 1 >= _MAX_REFUSALS

    def _identity_of(self, run: Run) -> NodeIdentity | None:
        server: Server | None = self._dispatcher.catalog.cached().servers.get(run.server)
        return None if server is None else server.node


def _check(statement: RunStatement, run: Run, identity: NodeIdentity) -> None:
    """Raise BadEnvelope if a statement is not about this run.  Times are the node's claim, and not looked at."""
    expected = {
        "job": run.job.id,
        "attempt": run.attempt,
        "model": run.job.model,
        "node": identity.id,
        "payload_sha256": hashlib.sha256(run.payload.encode()).hexdigest(),
    }
    for name, value in expected.items():
        if getattr(statement, name) != value:
            raise BadEnvelope(f"its {name} is another")
