"""Results that servers push."""

from typing import Any

from flask import request

from app.api.openapi import blueprint, optional_headers, problem_responses, response_of
from app.auth.access import own_auth
from app.auth.api_keys import read_bearer
from app.context import context, dispatcher
from app.problems import ProblemError
from app.request_json import read_body
from app.schemas.job_schemas import JobPath, PushResult
from routing.dispatch.outcome import OutcomeKind
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.values import Job
from tasks import server_push
from tasks.servers import TOO_DEEP

api = blueprint("callback", "Inference servers", "/tasks/callback", scope=None)

_NO_JOB_ID = "00000000-0000-0000-0000-000000000000"


@api.post(
    "/<job_id>",
    responses={
        200: PushResult,
        202: response_of(PushResult, "The run has not ended: ignored"),
        **problem_responses(403, 413, 422, 503),
    },
    request_body={"content": {"application/json": {"schema": {}}}},
    openapi_extensions=optional_headers(
        X_Callback_Token="The token that was sent with the job.", Authorization="The same token, as Bearer."
    ),
)
@own_auth
def push_result(path: JobPath) -> tuple[dict[str, Any], int]:
    """Push the end of a run.

    It requires the token that was sent with the job's current run; a repeated push changes nothing.  The body is what
    the server would return to a poll.  422: the result cannot be stored, and the job has failed; or the body is not
    valid JSON, and the response names the error.  503: the worker of the run has gone, and the next one has not begun;
    push the result again.
    """
    job = _job_of_token(path.job_id)
    if server_push.is_between_workers(job):
        detail = "The worker of this run has gone, and the next has not begun: push again in a second."
        raise ProblemError(503, "between_workers", "Not now", detail)
    request.max_content_length = context().settings.max_push_bytes
    outcome = server_push.read_push(job, read_body(request)) if job.state is State.RUNNING else None
    if job.state in FINAL_STATES:
        server_push.release_quarantined_slot(job, read_body(request))
    if outcome is None:
        return PushResult.build(status="ignored" if job.state is State.RUNNING else job.state), _status(job)
    if outcome.kind is not OutcomeKind.PENDING:
        server_push.apply_push(job, outcome)
    if outcome.is_faulty_json:
        raise ProblemError(422, outcome.code, "Not a result that can be read", f"{outcome.message}.")
    if outcome is TOO_DEEP:
        raise ProblemError(422, outcome.code, "Not a result that can be kept", outcome.message)
    state = dispatcher().store.get_state(job.id)
    return PushResult.build(status=state or job.state), 200


def _status(job: Job) -> int:
    return 202 if job.state is State.RUNNING else 200


def _job_of_token(job_id: str) -> Job:
    """Return the job, if the token is that of its current run.  The refusal does not reveal whether the job exists."""
    job = dispatcher().store.get(job_id) if job_id.isprintable() else None
    valid = (
        server_push.is_valid_token(_token(), _NO_JOB_ID, 0)
        if job is None
        else server_push.is_token_of_run(job, _token())
    )
    if job is None or not valid:
        detail = "The token is not that of this job's present run."
        raise ProblemError(403, "forbidden", "Not allowed", detail)
    return job


def _token() -> str:
    """Return the token in a header or in the URL: some servers push to a URL and cannot send a header."""
    return read_bearer(request.environ) or request.headers.get("X-Callback-Token") or request.args.get("token", "")
