"""Read, cancel and retry jobs and dead jobs.  A tenant sees its own; an operator sees all."""

from typing import Any

from flask import request

from app.api.openapi import blueprint, problem_responses, response_of
from app.auth.access import scope, visible_tenant
from app.context import dispatcher
from app.deferred import WaitForJob, defer
from app.payloads import is_own, read_payload
from app.problems import printable_text
from app.request_deadline import answered_in_time
from app.schemas.base import iso_time
from app.schemas.credit_schemas import CostView
from app.schemas.cursors import batch_filter, decode_job_cursor, encode_job_cursor, label_filter, model_filter
from app.schemas.job_schemas import (
    AttemptList,
    AttemptView,
    CancelResult,
    DlqQuery,
    ExplanationView,
    JobDetail,
    JobList,
    JobPath,
    JobView,
    ListQuery,
    RetryAllQuery,
    RetryAllResult,
    SignedResultView,
    WaitQuery,
    estimate_basis,
    estimated_start_s,
    position_fields,
)
from app.watched import keep_watched
from routing.queries import explain, job_list, short_ids
from routing.queries.job_cost import read_cost
from routing.queries.job_timeline import attempts_of
from routing.queries.positions import QueuePosition, read_position
from slotkeeper import json_text, signatures
from slotkeeper.errors import Conflict, InsufficientCredits, JobNotFound, NotFound
from slotkeeper.jobs import envelopes
from slotkeeper.jobs.states import State
from slotkeeper.jobs.terms import decode_terms
from slotkeeper.jobs.values import Job
from slotkeeper.outbox import retention
from slotkeeper.registry.identity import Scope
from tasks.services import nodes, workers

api = blueprint("jobs", "Jobs", "/queue/jobs", scope=Scope.READ)
dlq_api = blueprint("dlq", "Dead letter queue", "/admin/dlq", scope=Scope.MANAGE)
_MAX_RETRIED = 500  # jobs that one request queues again


@api.get("/<job_id>", responses={200: JobDetail, **problem_responses(404, 409, 422)})
def get_job(path: JobPath, query: WaitQuery) -> dict[str, Any]:
    """Show a job, with its position while it waits and its result when it has ended.

    `wait`: the response is sent when the job has ended, or after that many seconds.  If too many requests wait already,
    it is sent at once: repeat the request.  Wherever a path or a query names a job, 8 or more of the first characters
    of its id, or its last 8, are enough.  409: several jobs have such an id; `candidates` lists some of them.
    """
    job = visible_job(path.job_id)
    gone_s = decode_terms(job.terms).cancel_when_gone
    if query.wait and job.finished_ms is None:
        keep_watched(job.id, gone_s)
        # The server calls this view once more after the wait.  This answer is sent only if it cannot wait.
        defer(request.environ, WaitForJob(job.id, query.wait, gone_s))
    payload = read_payload(job) if query.include else None
    return JobDetail.build(
        job,
        payload=payload,
        cost=None if job.reserved is None else CostView.build(read_cost(dispatcher().store.database, job)),
        **position_fields(job.state, _position_of(job)),
    )


@api.get("/<job_id>/envelope", responses={200: SignedResultView, **problem_responses(404, 409)})
def get_envelope(path: JobPath) -> dict[str, Any]:
    """Show the signed result of a job that ran on a node, with the key that signed it.

    404: it has no result of a node.  Times in the signed statement are the node's claim.
    """
    job = visible_job(path.job_id)
    stored = envelopes.find_envelope(dispatcher().store.database, job.id)
    if stored is None or job.result is None:
        raise NotFound(f"Job {job.id!r} has no result that a node has signed.", job_id=job.id)
    key = nodes().find_signer(stored.key_id)
    return SignedResultView.build(
        job_id=job.id,
        envelope=json_text.loads(stored.text),
        key_id=stored.key_id,
        public_key=key and signatures.encode_bytes(key.public_key),
        node=key and key.node,
        owner=key and key.owner,
        payload=job.payload if is_own(job) else None,
        result=job.result,
        verified_at=iso_time(stored.at_ms),
    )


@api.get("", responses={200: JobList, **problem_responses(422)})
def list_jobs(query: ListQuery) -> dict[str, Any]:
    """List jobs, the newest first."""
    jobs = job_list.find_jobs(
        dispatcher().store.database,
        state=query.status,
        model=model_filter(query.model),
        tenant=visible_tenant(),
        batch=batch_filter(query.batch),
        labels=[label_filter(label) for label in query.label],
        before_seq=decode_job_cursor(query.cursor),
        limit=query.limit,
    )
    return JobList.build(jobs=[JobView.build(job) for job in jobs], next_cursor=encode_job_cursor(jobs, query.limit))


@api.post(
    "/<job_id>/cancel",
    responses={
        200: CancelResult,
        202: response_of(CancelResult, "Its server was asked to stop it"),
        **problem_responses(404, 409, 415),
    },
)
@scope(Scope.SUBMIT)
@answered_in_time
def cancel_job(path: JobPath) -> tuple[dict[str, Any], int]:
    """Cancel a job.

    200: the job was waiting, or was canceled before; it is canceled.  202: the job is running; it is canceled as soon
    as its server has stopped it.  409: the job has ended with another outcome.
    """
    job = visible_job(path.job_id)
    if dispatcher().cancel(job.id) is State.RUNNING:
        return CancelResult.build(job_id=job.id, status="canceling"), 202
    return CancelResult.build(job_id=job.id, status="canceled"), 200


@api.get("/<job_id>/attempts", responses={200: AttemptList, **problem_responses(404, 409)})
def list_attempts(path: JobPath) -> dict[str, Any]:
    """List the attempts of a job with their outcomes, the oldest first."""
    job = visible_job(path.job_id)
    attempts = attempts_of(dispatcher().store.list_events(job.id))
    return AttemptList.build(job_id=job.id, attempts=[AttemptView.build(attempt) for attempt in attempts])


@api.get("/<job_id>/explain", responses={200: ExplanationView, **problem_responses(404, 409)})
def explain_job(path: JobPath) -> dict[str, Any]:
    """Explain what a job waits for, in one sentence and in fields, and when it should start.

    `code` is one of: turn, slots_busy, tenant_slots, max_slots, tenant_paused, model_paused, model_breaker_open,
    model_probing, server_breaker_open, server_away, server_silent, server_cooling, slot_withheld, server_unavailable,
    constraints_unmet, no_server, no_worker, retry, not_before, held, not_in_room, run_waits, redis_away.
    """
    job = visible_job(path.job_id)
    explanation = explain.explain_job(dispatcher(), workers(), job)
    return ExplanationView.build(
        explanation,
        job_id=job.id,
        status=job.state,
        estimated_start_s=estimated_start_s(explanation.estimate),
        estimate_basis=estimate_basis(explanation.estimate),
    )


def visible_job(job_id: str) -> Job:
    """Return a job that this request may see, by its id, or by the first or last characters of its id.

    Raises JobNotFound, also for a job of another tenant; Conflict: several visible jobs have such an id.
    """
    store, tenant = dispatcher().store, visible_tenant()
    job = store.get(job_id) if job_id.isprintable() else None
    if job is None and (full_id := _resolve_short_id(job_id, tenant)) is not None:
        job = store.get(full_id)
    if job is None or tenant not in (None, job.tenant):
        detail = f"No job that you may see has the id {printable_text(job_id)!r}; it may be deleted."
        raise JobNotFound(detail, job_id=job_id)
    return job


def _resolve_short_id(short_id: str, tenant: str | None) -> str | None:
    """Return the only id that begins or ends with `short_id`; None: there is none.

    tenant: whose jobs are searched; None: those of all tenants.  Raises Conflict: there are several.
    """
    found = short_ids.find(dispatcher().store.database, short_id, tenant)
    if len(found.ids) > 1:
        candidates = ", ".join(found.ids) + (" and others" if found.more else "")
        raise Conflict(f"{short_id!r} may be {candidates}: give more of the id.", candidates=found.ids)
    return found.ids[0] if found.ids else None


def _position_of(job: Job) -> QueuePosition:
    if job.state is not State.QUEUED:
        return QueuePosition()
    return read_position(dispatcher(), workers(), job.queued)


@dlq_api.get("", responses={200: JobList, **problem_responses(422)})
def list_dead(query: DlqQuery) -> dict[str, Any]:
    """List dead jobs, the newest first, each with its last error.

    `GET /queue/jobs/{job_id}/attempts` lists all attempts of a job.
    """
    found = job_list.find_jobs(
        dispatcher().store.database,
        tenant=visible_tenant(),
        state=State.DEAD,
        model=model_filter(query.model),
        before_seq=decode_job_cursor(query.cursor),
        limit=query.limit,
    )
    return JobList.build(jobs=[JobView.build(job) for job in found], next_cursor=encode_job_cursor(found, query.limit))


@dlq_api.post("/<job_id>/retry", responses={200: JobView, **problem_responses(402, 404, 409, 415)})
@answered_in_time
def retry_dead(path: JobPath) -> dict[str, Any]:
    """Queue a dead job again, in the order of its acceptance and with new budgets of retries and crashes."""
    job = visible_job(path.job_id)
    dispatcher().revive(job.id)
    return JobView.build(visible_job(job.id))


@dlq_api.post("/retry-all", responses={200: RetryAllResult, **problem_responses(415, 422)})
def retry_all_dead(query: RetryAllQuery) -> dict[str, Any]:
    """Queue dead jobs again, of all models or of one, up to 500.  `more`: repeat the request for the others.

    Jobs of models that were removed stay dead, and are counted in `left_out`; so do those of tenants that have too few
    credits, which `unpaid` names.
    """
    model, tenant, unpaid, retried = model_filter(query.model), visible_tenant(), set[str](), 0
    while True:
        found, left_out = job_list.find_retryable(
            dispatcher().store.database, model, tenant, limit=_MAX_RETRIED + 1, but_of=unpaid
        )
        known = len(unpaid)
        for job in found[:_MAX_RETRIED][::-1]:
            if job.tenant not in unpaid:
                retried += _try_revive(job.id, job.tenant, unpaid)
        if len(unpaid) == known or len(found) <= _MAX_RETRIED:
            more = len(found) > _MAX_RETRIED
            return RetryAllResult.build(retried=retried, more=more, left_out=left_out, unpaid=sorted(unpaid))


@dlq_api.delete("/<job:job_id>", responses={204: None, **problem_responses(404, 409, 415)})
def delete_dead(path: JobPath) -> tuple[str, int]:
    """Remove a dead job permanently.  The ledger still counts it."""
    job = visible_job(path.job_id)
    if not retention.delete_dead_job(dispatcher().store.database, job.id):
        raise Conflict(f"Job {job.id!r} is {job.state}; only a dead job can be removed.", status=job.state)
    return "", 204


def _try_revive(job_id: str, tenant: str, unpaid: set[str]) -> bool:
    """Queue a dead job again.  Return False if it was retried or deleted meanwhile, or its model was removed.

    Adds its tenant to `unpaid` if that has too few credits.
    """
    try:
        dispatcher().revive(job_id)
    except InsufficientCredits:
        unpaid.add(tenant)
        return False
    except (Conflict, JobNotFound):
        return False
    return True
