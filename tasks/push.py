"""A server tells the end of a run by itself, instead of being polled.

Whether the push shows the right token is for the door to check, before.  Everything else is as if a worker had
been told: the same verdict, the same guarded write.  The worker that still polls finds its run over.
"""

from jobs.record import Job
from routing import exact, runs
from routing.outcome import Kind, Outcome
from tasks import callbacks
from tasks.descriptions import Misconfigured, server_for
from tasks.servers import Call
from tasks.settlement import settle
from tasks.wiring import dispatcher

# What a push can say about the end of a run.  Of anything else the polling worker makes more.
_ENDS = frozenset({Kind.DONE, Kind.FAILED, Kind.RETRY, Kind.CANCELED})
_FETCH_S = 30.0  # for a description that has the result fetched from elsewhere


def read(job: Job, body: bytes) -> Outcome | None:
    """What the push says; None: not the end of the run, or its server is not known any more."""
    known = dispatcher().fleet.snapshot().servers.get(job.server or "")
    url = known.endpoints.get(job.model) if known else None
    if url is None:
        return None
    if _names_another(job, body):
        return None
    try:
        server = server_for(url, dispatcher().fleet.model(job.model), job.described_by)
    except Misconfigured:  # The worker that watches the run says so.
        return None
    if not server.description.keeps_results and server.description.mode != "callback":
        return None  # The worker that polls is its one reader.
    outcome = server.pushed(_call(job), job.remote_id, body)
    return outcome if outcome.kind in _ENDS else None


def _names_another(job: Job, body: bytes) -> bool:
    """Whether it is about another job of ours.  What a server calls its run by itself is its own affair."""
    try:
        told = exact.loads(body)
    except ValueError:
        return False
    named = told.get("job_id") if isinstance(told, dict) else None
    if not isinstance(named, str) or named in (job.id, job.remote_id) or not named.isprintable():
        return False
    return dispatcher().store.state_of(named) is not None


def push(job: Job, outcome: Outcome) -> bool:
    """End the run that `job` shows, as the worker would.  False: it is over already, and nothing was changed.

    Raises RecordUnavailable.
    """
    task = runs.task_of(dispatcher(), job)
    if task is None:
        return False
    return settle(task, outcome, canceling=task.run.cancel_requested).moved is not None


def _call(job: Job) -> Call:
    return Call(
        job_id=job.id,
        attempt=job.attempt,
        payload=exact.loads(job.payload or "{}"),
        callback_url=callbacks.url(job.id),
        callback_token=callbacks.token(job.id, job.attempt),
        deadline_s=_FETCH_S,
        model=job.model,
    )
