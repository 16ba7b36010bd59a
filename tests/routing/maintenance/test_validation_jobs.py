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
from tests.support.stage import SECOND, Stage

RIGHT, WRONG = {"answer": 4, "took": 1}, {"answer": 5}


class Lies(dict[str, Any]):
    """Answers by server; others answer right."""


class Validating:
    """A harness with one validation; its methods run one pass of the validation task."""

    def __init__(self, stage: Stage, *servers: str) -> None:
        self.stage, self.validations = stage, Validations(stage.database)
        for server in servers:
            stage.register(1, server=server)
        self.set()

    def set(self, **changes: Any) -> None:
        given = {
            "name": "sum",
            "model": "zimg",
            "payload": {"prompt": "2 + 2"},
            "expected": {"answer": 4},
            "every_s": 60,
        }
        self.validations.set(Validation(**given | {"changed_ms": self.stage.now} | changes))

    def submit(self) -> int:
        return validation_jobs.submit_due(self.stage.dispatcher, self.validations)

    def judge(self) -> int:
        catalog = Catalog(self.stage.database)
        return validation_jobs.judge_answers(self.stage.dispatcher, self.validations, catalog, 0.2)

    def answer(self, result: Any, kind: OutcomeKind = OutcomeKind.DONE) -> str:
        """Submit the next job, run it, and judge; returns the server."""
        self.stage.later(100 * SECOND)
        assert self.submit() == 1
        run = self.stage.start()
        given = result.get(run.lease.server, RIGHT) if isinstance(result, Lies) else result
        outcome = {"result": given} if kind is OutcomeKind.DONE else {}
        self.stage.settle(run, kind, **outcome)
        assert self.judge() == 1
        return run.lease.server

    def state(self, server: str) -> str:
        return self.stage.dispatcher.catalog.refresh().servers[server].state

    def failures(self) -> list[dict[str, Any]]:
        with self.stage.database.read() as connection:
            rows = connection.execute(select(events).where(events.c.type == "validation.failed")).all()
        return [json.loads(row.data) for row in rows]


def test_a_job_is_submitted_when_it_is_due_as_the_tenant_of_validations(stage: Stage) -> None:
    harness = Validating(stage, "gpu")
    assert (harness.submit(), harness.submit()) == (1, 0)
    (job,) = stage.store.list_queued()
    stored = stage.job(job.id)
    assert (stored.tenant, stored.source, stored.deadline_ms, stored.payload) == (
        TENANT,
        TENANT,
        None,
        '{"prompt":"2 + 2"}',
    )
    stage.later(91 * SECOND)
    assert harness.submit() == 1
    harness.set(is_enabled=False)
    assert harness.submit() == 0


def test_answers_are_judged_once_each(stage: Stage) -> None:
    harness = Validating(stage, "gpu")
    for result in (RIGHT, WRONG):
        harness.answer(result)
    harness.answer(None, OutcomeKind.FAILED)
    assert harness.judge() == 0
    (answers,) = harness.validations.read_answers({})
    assert (answers.server, answers.right, answers.wrong, answers.none) == ("gpu", 1, 1, 1)
    assert answers.last_wrong == "result.answer differs"


def test_a_validation_job_that_fails_is_not_kept_as_a_dead_job(stage: Stage) -> None:
    harness = Validating(stage)
    stage.register(1, max_retries=0)
    harness.answer(None, OutcomeKind.RETRY)
    (answers,) = harness.validations.read_answers({})
    assert (answers.none, answers.judged) == (1, 0)
    assert ledger.count_by_state(stage.database)[State.DEAD] == 0


def test_a_server_that_is_often_wrong_is_drained_until_an_operator_resumes_it(stage: Stage) -> None:
    harness = Validating(stage, "gpu", "other")
    stage.set_state(AdminState.PAUSED, "other")
    for _ in range(4):
        harness.answer(RIGHT)
    stage.set_state(AdminState.ONLINE, "other")
    stage.set_state(AdminState.PAUSED, "other")
    assert harness.answer(WRONG) == "gpu"
    assert harness.state("gpu") == "online", "it was the last server that accepts jobs"
    assert harness.failures() == [
        {"server": "gpu", "wrong": 1, "of": 5, "drained": False, "last": "result.answer differs"}
    ]
    stage.set_state(AdminState.ONLINE, "other")
    while harness.answer(WRONG) != "gpu":
        pass
    assert harness.state("gpu") == "draining" and harness.failures()[-1]["drained"]
    found = stage.dispatcher.catalog.get().servers["gpu"]
    assert found.reason is not None and "of its last" in found.reason and found.changed_by == "slotkeeper"
    stage.set_state(AdminState.ONLINE, "gpu")
    while harness.answer(Lies(gpu=WRONG)) != "gpu":
        pass
    assert harness.state("gpu") == "online", "answers from before the resume do not count"


def test_few_wrong_answers_drain_nothing(stage: Stage) -> None:
    harness = Validating(stage, "gpu", "other")
    stage.set_state(AdminState.PAUSED, "other")
    for n in range(20):
        harness.answer(WRONG if n in (6, 12) else RIGHT)
    assert harness.state("gpu") == "online" and harness.failures() == []


def test_a_validation_job_that_waits_too_long_is_canceled_and_counts_as_no_answer(stage: Stage) -> None:
    harness = Validating(stage)
    stage.register(1)
    stage.submit()
    stage.start()
    assert harness.submit() == 1
    (job,) = stage.store.list_queued()
    stage.later(599 * SECOND)
    assert harness.judge() == 0
    stage.later(2 * SECOND)
    assert harness.judge() == 0 and stage.state(job.id) is State.CANCELED
    assert harness.judge() == 1 and harness.validations.read_answers({}) == []


def test_a_job_that_was_noted_and_never_submitted_is_given_up(stage: Stage) -> None:
    harness = Validating(stage, "gpu")
    (due,) = harness.validations.list_all()
    assert harness.validations.claim(due, stage.now + 10**9, "nobody", stage.now)
    assert harness.judge() == 0
    stage.later(601 * SECOND)
    assert harness.judge() == 1 and harness.validations.list_awaited(10) == []


def test_a_validation_of_an_unknown_model_does_not_stop_the_others(stage: Stage) -> None:
    harness = Validating(stage, "gpu")
    harness.set(name="a", model="gone")
    assert harness.submit() == 1
    assert len(harness.validations.list_awaited(10)) == 1
