"""Submit jobs with known answers, compare their results, and drain servers that answer wrongly.

For a server such a job is a job like any other: it names no server, and has no header, id or deadline that others have
not.  Its tenant, its source and that it is not retried stay here.
"""

import random
from contextlib import suppress

import orjson
import structlog

from routing.admission.job_request import JobRequest
from routing.admission.submission import Submission
from routing.dispatch.dispatcher import Dispatcher
from slotkeeper.clock import now_ms
from slotkeeper.db import Transaction
from slotkeeper.errors import Conflict, DatabaseUnavailable, JobNotFound, SlotkeeperError
from slotkeeper.jobs import events
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.terms import OnFailure
from slotkeeper.jobs.values import Job, JobError, new_job_id
from slotkeeper.outbox import retention
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.identity import Identity, Scope, Tenant
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.validations import (
    TENANT,
    AnswerOutcome,
    ServerAnswers,
    Validation,
    Validations,
    find_difference,
)
from slotkeeper.registry.values import AdminState

log = structlog.get_logger(__name__)

FAILED_TYPE = "validation.failed"
_SENDER = Identity(Tenant(TENANT), None, frozenset({Scope.SUBMIT}))
_SPREAD = (0.5, 1.5)  # of `every_s`
_LONGEST_WAIT_MS = 600_000
_AT_ONCE = 200
_FEWEST = 5  # With fewer answers a server is not judged.
_TOO_LATE = JobError("validation_late", "Canceled before it was started: a validation waits ten minutes at most.")


def submit_due(dispatcher: Dispatcher, validations: Validations) -> int:
    """Submit the jobs of validations that are due, and return how many.

    A job is noted before it is submitted, so each is judged; one that is then refused is passed over.
    """
    submitted, now = 0, now_ms()
    for due in validations.list_all():
        if not due.is_enabled or due.next_ms > now:
            continue
        job_id, next_ms = new_job_id(), now + round(due.every_s * 1000 * random.uniform(*_SPREAD))
        if not validations.claim(due, next_ms, job_id, now):
            continue
        request = JobRequest(model=due.model, payload=dict(due.payload), on_failure=OnFailure(max_retries=0))
        try:
            dispatcher.submit([Submission(request, tenant=TENANT, source=TENANT, id=job_id)], _SENDER)
        except DatabaseUnavailable:
            raise
        except SlotkeeperError as refused:
            log.warning("validation_not_submitted", validation=due.name, error=refused.detail)
            validations.note(job_id, AnswerOutcome.NONE, now, detail=refused.detail)
        else:
            submitted += 1
    return submitted


def judge_answers(dispatcher: Dispatcher, validations: Validations, catalog: Catalog, most_wrong: float) -> int:
    """Compare the results that have come, and return how many.

    A server is drained if the share of its wrong answers is `most_wrong` or more, unless it is the last one online of
    one of its models: then there is only the event.
    """
    judged, wrong_at, all_awaited = 0, set[str](), validations.list_awaited(_AT_ONCE)
    known = {one.name: one for one in validations.list_all()} if all_awaited else {}
    for awaited in all_awaited:
        job = dispatcher.store.get(awaited.job_id)
        if job is not None and job.state not in FINAL_STATES:
            _cancel_late(dispatcher, job, awaited.at_ms)
        elif job is not None or now_ms() - awaited.at_ms > _LONGEST_WAIT_MS:
            outcome, detail = _compare(job, known.get(awaited.validation))
            server = None if job is None else job.server
            if validations.note(awaited.job_id, outcome, now_ms(), server, detail):
                judged += 1
                if outcome is AnswerOutcome.WRONG and server is not None:
                    wrong_at.add(server)
            if job is not None and job.state is State.DEAD:  # No client waits for it.
                with suppress(Conflict):  # A webhook still has to receive its events; retention deletes it later.
                    retention.delete_dead_job(dispatcher.store.database, job.id)
    for server in sorted(wrong_at):
        _judge_server(dispatcher, validations, catalog, server, most_wrong)
    return judged


def _cancel_late(dispatcher: Dispatcher, job: Job, submitted_ms: int) -> None:
    if job.state is not State.RUNNING and now_ms() - submitted_ms > _LONGEST_WAIT_MS:
        with suppress(Conflict, JobNotFound):
            dispatcher.cancel(job.id, _TOO_LATE)


def _compare(job: Job | None, validation: Validation | None) -> tuple[AnswerOutcome, str | None]:
    """Return the outcome of a job, and where its result differs or why there is none."""
    if job is None or job.state is not State.COMPLETED or job.result is None:
        return AnswerOutcome.NONE, None if job is None else job.error_code
    if validation is None:  # It was removed meanwhile.
        return AnswerOutcome.NONE, None
    difference = find_difference(
        validation.expected, orjson.loads(job.result), validation.compare, validation.tolerance
    )
    return (AnswerOutcome.RIGHT, None) if difference is None else (AnswerOutcome.WRONG, difference)


def _judge_server(
    dispatcher: Dispatcher, validations: Validations, catalog: Catalog, server: str, most_wrong: float
) -> None:
    snapshot = dispatcher.catalog.refresh()
    found = snapshot.servers.get(server)
    if found is None or found.state != AdminState.ONLINE:
        return
    # What came before an operator set its state is over.
    answers = next(iter(validations.read_answers({server: found.changed_ms or 0}, server)), None)
    if answers is None or answers.judged < _FEWEST or answers.wrong < most_wrong * answers.judged:
        return
    reason = f"validation: {answers.wrong} of its last {answers.judged} answers were wrong"
    is_last = _is_last_of_a_model(snapshot, server)
    _write_event(dispatcher, answers, drained=not is_last)
    log.warning("server_answers_wrongly", server=server, wrong=answers.wrong, of=answers.judged, drained=not is_last)
    if not is_last:
        catalog.set_server_state(server, AdminState.DRAINING, reason=reason, by="slotkeeper", now_ms=now_ms())
        dispatcher.catalog.refresh()


def _is_last_of_a_model(snapshot: CatalogSnapshot, server: str) -> bool:
    """Return whether a model would be left without a server that takes jobs."""
    others = [other for other in snapshot.servers.values() if other.name != server and other.takes_jobs]
    return any(not any(model in other.endpoints for other in others) for model in snapshot.servers[server].endpoints)


def _write_event(dispatcher: Dispatcher, answers: ServerAnswers, *, drained: bool) -> None:
    data = {"server": answers.server, "wrong": answers.wrong, "of": answers.judged, "drained": drained}
    data |= {"last": answers.last_wrong}

    def unit(tx: Transaction) -> None:
        events.add_event(tx, f"server/{answers.server}", FAILED_TYPE, now_ms(), data)

    dispatcher.store.database.write(unit)
