"""Jobs with known answers: submitted like others, judged once, and a server that is often wrong is drained."""

import json
from typing import Any

from sqlalchemy import select

from routing.dispatch.outcome import OutcomeKind
from routing.maintenance import validation_jobs
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import events
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.validations import TENANT, Validation, Validations
from slotkeeper.registry.values import AdminState
from tests.support.harness import SECOND, Harness

RIGHT, WRONG = {"answer": 4, "took": 1}, {"answer": 5}


class Lies(dict[str, Any]):
    """Answers by server; others answer right."""


class Validating:
    """A harness with one validation; its methods run one pass of the validation task."""

    def __init__(self, harness: Harness, *servers: str) -> None:
        self.harness, self.validations = harness, Validations(harness.database)
        for server in servers:
            harness.register(1, server=server)
        self.set()

    def set(self, **changes: Any) -> None:
        given = {
            "name": "sum",
            "model": "zimg",
            "payload": {"prompt": "2 + 2"},
            "expected": {"answer": 4},
            "every_s": 60,
        }
        self.validations.set(Validation(**given | {"changed_ms": self.harness.now} | changes))

    def submit(self) -> int:
        return validation_jobs.submit_due(self.harness.dispatcher, self.validations)

    def judge(self) -> int:
        catalog = Catalog(self.harness.database)
        return validation_jobs.judge_answers(self.harness.dispatcher, self.validations, catalog, 0.2)

    def answer(self, result: Any, kind: OutcomeKind = OutcomeKind.DONE) -> str:
        """Submit the next job, run it, and judge; returns the server."""
        self.harness.later(100 * SECOND)
        assert self.submit() == 1
        run = self.harness.start()
        given = result.get(run.lease.server, RIGHT) if isinstance(result, Lies) else result
        outcome = {"result": given} if kind is OutcomeKind.DONE else {}
        self.harness.settle(run, kind, **outcome)
        assert self.judge() == 1
        return run.lease.server

    def state(self, server: str) -> str:
        return self.harness.dispatcher.catalog.refresh().servers[server].state

    def failures(self) -> list[dict[str, Any]]:
        with self.harness.database.read() as connection:
            rows = connection.execute(select(events).where(events.c.type == "validation.failed")).all()
        return [json.loads(row.data) for row in rows]


def test_a_job_is_submitted_when_it_is_due_as_the_tenant_of_validations(harness: Harness) -> None:
    validating = Validating(harness, "gpu")
    assert (validating.submit(), validating.submit()) == (1, 0)
    (job,) = harness.store.list_queued()
    stored = harness.job(job.id)
    assert (stored.tenant, stored.source, stored.deadline_ms, stored.payload) == (
        TENANT,
        TENANT,
        None,
        '{"prompt":"2 + 2"}',
    )
    harness.later(91 * SECOND)
    assert validating.submit() == 1
    validating.set(is_enabled=False)
    assert validating.submit() == 0


def test_answers_are_judged_once_each(harness: Harness) -> None:
    validating = Validating(harness, "gpu")
    for result in (RIGHT, WRONG):
        validating.answer(result)
    validating.answer(None, OutcomeKind.FAILED)
    assert validating.judge() == 0
    (answers,) = validating.validations.read_answers({})
    assert (answers.server, answers.right, answers.wrong, answers.none) == ("gpu", 1, 1, 1)
    assert answers.last_wrong == "result.answer differs"


def test_a_validation_job_that_fails_is_not_kept_as_a_dead_job(harness: Harness) -> None:
    validating = Validating(harness)
    harness.register(1, max_retries=0)
    validating.answer(None, OutcomeKind.RETRY)
    (answers,) = validating.validations.read_answers({})
    assert (answers.none, answers.judged) == (1, 0)
    assert ledger.count_by_state(harness.database)[State.DEAD] == 0


def test_a_server_that_is_often_wrong_is_drained_until_an_operator_resumes_it(harness: Harness) -> None:
    validating = Validating(harness, "gpu", "other")
    harness.set_state(AdminState.PAUSED, "other")
    for _ in range(4):
        validating.answer(RIGHT)
    harness.set_state(AdminState.ONLINE, "other")
    harness.set_state(AdminState.PAUSED, "other")
    assert validating.answer(WRONG) == "gpu"
    assert validating.state("gpu") == "online", "it was the last server that accepts jobs"
    assert validating.failures() == [
        {"server": "gpu", "wrong": 1, "of": 5, "drained": False, "last": "result.answer differs"}
    ]
    harness.set_state(AdminState.ONLINE, "other")
    while validating.answer(WRONG) != "gpu":
        pass
    assert validating.state("gpu") == "draining" and validating.failures()[-1]["drained"]
    found = harness.dispatcher.catalog.get().servers["gpu"]
    assert found.reason is not None and "of its last" in found.reason and found.changed_by == "slotkeeper"
    harness.set_state(AdminState.ONLINE, "gpu")
    while validating.answer(Lies(gpu=WRONG)) != "gpu":
        pass
    assert validating.state("gpu") == "online", "answers from before the resume do not count"


def test_few_wrong_answers_drain_nothing(harness: Harness) -> None:
    validating = Validating(harness, "gpu", "other")
    harness.set_state(AdminState.PAUSED, "other")
    for n in range(20):
        validating.answer(WRONG if n in (6, 12) else RIGHT)
    assert validating.state("gpu") == "online" and validating.failures() == []


def test_a_validation_job_that_waits_too_long_is_canceled_and_counts_as_no_answer(harness: Harness) -> None:
    validating = Validating(harness)
    harness.register(1)
    harness.submit()
    harness.start()
    assert validating.submit() == 1
    (job,) = harness.store.list_queued()
    harness.later(599 * SECOND)
    assert validating.judge() == 0
    harness.later(2 * SECOND)
    assert validating.judge() == 0 and harness.state(job.id) is State.CANCELED
    assert validating.judge() == 1 and validating.validations.read_answers({}) == []


def test_a_claimed_validation_whose_job_was_never_submitted_is_abandoned(harness: Harness) -> None:
    validating = Validating(harness, "gpu")
    (due,) = validating.validations.list_all()
    assert validating.validations.claim(due, harness.now + 10**9, "nobody", harness.now)
    assert validating.judge() == 0
    harness.later(601 * SECOND)
    assert validating.judge() == 1 and validating.validations.list_awaited(10) == []


def test_a_validation_of_an_unknown_model_does_not_stop_the_others(harness: Harness) -> None:
    validating = Validating(harness, "gpu")
    validating.set(name="a", model="gone")
    assert validating.submit() == 1
    assert len(validating.validations.list_awaited(10)) == 1
