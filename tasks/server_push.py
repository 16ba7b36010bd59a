"""A server pushes the end of a run, instead of being polled: the token, the URL, reading and applying the push.

The API checks the token first (`is_token_of_run`).  Then a push ends the run as a worker would: by the same rules, with
the same guarded write.  A worker that still polls finds that its run is over.
"""

import hmac
from functools import lru_cache, partial

from routing.dispatch.dispatcher import active_run_of
from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.dispatch.run_steps import end_run
from routing.maintenance import quarantined_slots
from slotkeeper import json_text
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import State
from slotkeeper.jobs.values import Job
from slotkeeper.process import singleton
from slotkeeper.registry.run_config import apply_terms
from tasks import retries
from tasks.config import TaskSettings
from tasks.security.keyring import callback_keys
from tasks.server_adapters import Misconfigured, adapter_for, endpoint_of_run
from tasks.servers import RunDetails, ServerSession, call_server
from tasks.servers.pointers import MISSING, resolve
from tasks.servers.responses import NOT_JSON, Response
from tasks.services import dispatcher


def push_token(job_id: str, attempt: int) -> str:
    return _token(callback_keys()[0], job_id, attempt)


def is_valid_token(token: str, job_id: str, attempt: int) -> bool:
    valid = (_token(key, job_id, attempt).encode() for key in callback_keys())
    return any(hmac.compare_digest(token.encode(), expected) for expected in valid)


def _token(key: bytes, job_id: str, attempt: int) -> str:
    # A copy, because each call of `hmac.digest` releases the interpreter lock: another thread may then keep the lock
    # for up to 5 ms while the event loop waits.  `update` keeps the lock for data below 2 KiB.
    signature = _keyed_hmac(key).copy()
    signature.update(f"callback {job_id} {attempt}".encode())
    return signature.hexdigest()


@lru_cache(8)
def _keyed_hmac(key: bytes) -> hmac.HMAC:
    return hmac.new(key, digestmod="sha256")


def push_url(job_id: str) -> str:
    return f"{_callback_base_url()}/tasks/callback/{job_id}"


@singleton
def _callback_base_url() -> str:
    return TaskSettings().callback_base  # Cached, because reading the settings is slow and every run needs the URL.


# The outcomes with which a push ends a run.  All others are left to the worker that polls.
_END_KINDS = frozenset({OutcomeKind.DONE, OutcomeKind.FAILED, OutcomeKind.RETRY, OutcomeKind.CANCELED})
_FETCH_DEADLINE_S = 30.0  # of the request for a result that the description fetches separately


def read_push(job: Job, body: bytes) -> Outcome | None:
    """Return the outcome that a push reports; None: it does not end the run, or the run's server was removed.

    PENDING: the push is faulty JSON, and a worker polls the run.  Without polls (mode `callback`) faulty JSON ends the
    run, because the server cannot be asked again.
    """
    url = endpoint_of_run(dispatcher().catalog.get(), job.server or "", job.model, job.sent_to)
    if url is None or url.startswith("node:"):  # What a node returns has to be verified.
        return None
    push = Response(200, {}, body)
    if _is_about_other_job(job, push):
        return None
    try:
        server = adapter_for(url, dispatcher().catalog.resolve(job.model), job.described_by)
    except Misconfigured:  # The run's worker reports this.
        return None
    if not server.description.keeps_results and server.description.mode != "callback":
        return None  # The result can be read only once, and the worker that polls reads it.
    run = _run_details(job, with_payload=server.description.asks_by_payload)
    outcome = server.read_push(run, job.remote_id, push)
    if outcome.kind is OutcomeKind.DONE and server.description.result is not None:
        outcome = call_server(
            server, partial(ServerSession.fetch_result, run=run, remote_id=job.remote_id, outcome=outcome)
        )
    if outcome.is_faulty_json and server.description.mode == "callback":
        outcome = outcome._replace(kind=OutcomeKind.RETRY, server_still_running=True)
    return outcome if outcome.kind in _END_KINDS or outcome.is_faulty_json else None


def release_quarantined_slot(job: Job, body: bytes) -> bool:
    """Release the quarantined slot of a run that has ended here, if the push reports its end at the server.

    Returns whether the slot was released.  Raises DatabaseUnavailable.
    """
    if quarantine.find(dispatcher().store.database, job.id, job.attempt) is None:
        return False
    outcome = read_push(job, body)
    if outcome is None or outcome.is_faulty_json:
        return False
    return quarantined_slots.release_run_slot(dispatcher(), job.id, job.attempt)


def _is_about_other_job(job: Job, push: Response) -> bool:
    """Return whether a push names another job of this installation.  Ids that the server itself chose are ignored."""
    job_id = MISSING if push.json is NOT_JSON else resolve(push.json, ("job_id",))
    if not isinstance(job_id, str) or job_id in (job.id, job.remote_id) or not job_id.isprintable():
        return False
    return dispatcher().store.get_state(job_id) is not None


def is_token_of_run(job: Job, token: str) -> bool:
    """Return whether this is the token that the server has for the job's current run.

    A forged token costs no query of the database.
    """
    if is_valid_token(token, job.id, job.attempt):
        return True
    attempt = next((earlier for earlier in _earlier_attempts(job) if is_valid_token(token, job.id, earlier)), None)
    return attempt is not None and attempt == _attempt_at_server(job)


def _earlier_attempts(job: Job) -> range:
    """Return the earlier attempts that may have sent the request of the current run, the latest first."""
    if job.sent_ms is None or job.started_ms is None or job.sent_ms >= job.started_ms:
        return range(0)
    return range(job.attempt - 1, 0, -1)


def _attempt_at_server(job: Job) -> int:
    """Return the attempt whose token the server has, if another worker has resumed its run."""
    starts = (event for event in dispatcher().store.list_events(job.id) if event.type == EVENT_TYPES[State.RUNNING])
    return max((event.attempt for event in starts if event.at_ms <= (job.sent_ms or 0)), default=job.attempt)


def is_between_workers(job: Job) -> bool:
    """Return whether the run continues at the server, and no worker has resumed it yet."""
    return job.state is State.QUEUED and job.remote_id is not None


def apply_push(job: Job, outcome: Outcome) -> bool:
    """End the current run of `job` as its worker would.

    Returns False if the run is over already; nothing is changed then.  Raises DatabaseUnavailable.
    """
    active = active_run_of(dispatcher(), job)
    if active is None:
        return False
    config = apply_terms(dispatcher().catalog.resolve(job.model).config, job.terms)
    canceling = active.run.cancel_requested
    decision = retries.decide_end(
        active.run,
        outcome,
        config,
        dispatcher().settings,
        canceling=canceling,
        max_result_bytes=dispatcher().catalog.get().limits_of(job.tenant).max_result_bytes,
    )
    return end_run(dispatcher(), active, decision) is not None


def _run_details(job: Job, *, with_payload: bool) -> RunDetails:
    """Return the details of a run.  with_payload: the description uses the payload, which is then parsed."""
    return RunDetails(
        job_id=job.id,
        attempt=job.attempt,
        payload=json_text.loads(job.payload or "{}") if with_payload else None,
        callback_url=push_url(job.id),
        callback_token=push_token(job.id, job.attempt),
        deadline_s=_FETCH_DEADLINE_S,
        model=job.model,
    )
