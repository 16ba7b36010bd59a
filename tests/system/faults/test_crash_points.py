"""A process may die at every crash point and every pair of them: recovery brings all jobs to their ends.

Each case lives one life after another on one database and one Redis (life.py).  All but the last die by SIGKILL at a
crash point, so the second dies while it cleans up after the first, or in its own story.  The last
starts no new job.  Then the test compares the database, Redis, the inference server and the client.

    SLOTKEEPER_ALL_PAIRS=1 pytest tests/system/faults/test_crash_points.py     # all pairs instead of a sample
"""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import cast

import pytest
from sqlalchemy import select

from routing.queries import job_list
from slotkeeper.crash_points import POINTS
from slotkeeper.db import Database
from slotkeeper.jobs import credits, ledger
from slotkeeper.jobs import notifications as ends
from slotkeeper.jobs.credits import CHARGED_ENDS
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.events import TRANSITION_TYPES as STEPS
from slotkeeper.jobs.states import FINAL_STATES, TRANSITIONS, Budget, Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import events, jobs, messages
from slotkeeper.jobs.values import Event, Job
from slotkeeper.outbox.tables import receivers
from slotkeeper.outbox.webhook_messages import message_id
from tests.system.faults.lanes import Aftermath, Lane, Oracle, ended
from tests.system.faults.life import SLOTS, read_lines
from tools.cluster.stack import REPO

Case = tuple[str, ...]
_ENDS = {EVENT_TYPES[state]: state for state in FINAL_STATES}

_SAMPLE, _SEED = 40, 20_260
_ALL = os.environ.get("SLOTKEEPER_ALL_PAIRS") == "1"
pytestmark = pytest.mark.timeout(3600 if _ALL else 300)
_EVERY_PAIR = list(product(POINTS, POINTS))
PAIRS = _EVERY_PAIR if _ALL else sorted(random.Random(_SEED).sample(_EVERY_PAIR, _SAMPLE))


class Cases:
    """Lives cases in all lanes at once; asks for each are answered from its future."""

    def __init__(self, lanes: "SimpleQueue[Lane]", folder: Path) -> None:
        self._lanes, self._folder = lanes, folder
        self._pool = ThreadPoolExecutor(lanes.qsize())
        self._asked: dict[Case, Future[tuple[Aftermath, list[str]]]] = {}

    def ask(self, case: Case) -> "Future[tuple[Aftermath, list[str]]]":
        if case not in self._asked:
            home = self._folder / "-".join(crash.replace(":", "@") or "none" for crash in case)
            self._asked[case] = self._pool.submit(self._live, home, case)
        return self._asked[case]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _live(self, home: Path, case: Case) -> tuple[Aftermath, list[str]]:
        lane = self._lanes.get()
        try:
            aftermath = lane.live(home, list(case))
            found = problems(aftermath)
            shutil.rmtree(home)
            return aftermath, found
        finally:
            self._lanes.put(lane)


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, lanes: "SimpleQueue[Lane]", quick_folder: Path) -> Iterator[Cases]:
    """All the cases that are selected, begun at once."""
    yield from _begun(request, "case", Cases(lanes, quick_folder))


@pytest.fixture(scope="module")
def postgres_cases(
    request: pytest.FixtureRequest, postgres_lanes: "SimpleQueue[Lane]", quick_folder: Path
) -> Iterator[Cases]:
    """The same on PostgreSQL."""
    yield from _begun(request, "postgres_case", Cases(postgres_lanes, quick_folder / "postgres"))


def _begun(request: pytest.FixtureRequest, parameter: str, cases: Cases) -> Iterator[Cases]:
    for item in request.session.items:
        params = getattr(item, "callspec", None)
        if params is not None and item.path == request.path and parameter in params.params:
            cases.ask(params.params[parameter])
    yield cases
    cases.close()


@pytest.fixture(scope="module")
def _lived(lanes: "SimpleQueue[Lane]", quick_folder: Path) -> Iterator[Aftermath]:
    lane = lanes.get()
    yield lane.live(quick_folder / "whole", [""])
    lanes.put(lane)


@pytest.fixture
def whole_life(_lived: Aftermath, tmp_path: Path) -> Aftermath:
    """A copy of a life without a crash, which a test may change."""
    shutil.copytree(_lived.home, tmp_path / "home")
    oracle = SimpleNamespace(
        runs=_lived.oracle.runs.copy(),
        hooks=list(_lived.oracle.hooks),
        events=list(_lived.oracle.events),
        most_at_once=_lived.oracle.most_at_once,
    )
    home = tmp_path / "home"
    return replace(_lived, home=home, record=f"sqlite:///{home / 'record.db'}", oracle=cast(Oracle, oracle))


# -- planted faults, to test the rules ---------------------------------------------------------------------------


def a_lost_job(case: Aftermath) -> str:
    _alter(case, "DELETE FROM jobs WHERE id = 'life0-second'")
    return "life0-second was accepted and is lost"


def a_job_that_never_ends(case: Aftermath) -> str:
    _alter(case, "UPDATE jobs SET state = 'queued' WHERE id = 'life0-second'")
    return "life0-second is queued for ever"


def a_final_state_that_was_left(case: Aftermath) -> str:
    _alter(
        case,
        "INSERT INTO events (id, job_id, type, at_ms, attempt, data) "
        "SELECT id + 9999, job_id, type, at_ms, attempt, data FROM events WHERE actor IS NULL",
    )
    return "no way leads from"


def a_transition_without_its_event(case: Aftermath) -> str:
    _alter(case, "DELETE FROM events WHERE job_id = 'life0-second' AND type = 'job.completed'")
    return "its events say"


def a_token_that_did_not_grow(case: Aftermath) -> str:
    _alter(case, "UPDATE events SET attempt = 1 WHERE job_id = 'life0-stubborn' AND actor IS NULL")
    return "carries the token"


def a_job_that_was_not_charged(case: Aftermath) -> str:
    _alter(case, "DELETE FROM transfers WHERE kind = 'settle' AND job_id = 'life0-second'")
    return "life0-second has the transfers ['reserve']"


def credits_that_were_lost(case: Aftermath) -> str:
    _alter(case, "UPDATE balance_parts SET available = available - 1 WHERE id = (SELECT max(id) FROM balance_parts)")
    return "the credits of default do not balance"


def a_job_that_ran_twice(case: Aftermath) -> str:
    case.oracle.runs["life0-second"] += 1
    return "ran 2 times"


def a_slot_that_held_two(case: Aftermath) -> str:
    case.oracle.most_at_once = SLOTS + 1
    return "runs at once"


def an_end_that_was_not_notified(case: Aftermath) -> str:
    case.oracle.hooks.pop()
    return "was expected and never sent"


def a_step_that_was_not_sent(case: Aftermath) -> str:
    _alter(case, "DELETE FROM jobs WHERE id = 'life0-next'")
    return "follows life0-task and was never sent"


def an_unexpected_message(case: Aftermath) -> str:
    case.oracle.hooks.append(("msg_forged", {}))
    return "is not expected"


def an_event_that_a_webhook_did_not_get(case: Aftermath) -> str:
    removed = case.oracle.events.pop()[0]
    case.oracle.events[:] = [event for event in case.oracle.events if event[0] != removed]
    return "no webhook got it"


def events_that_were_sent_in_another_order(case: Aftermath) -> str:
    case.oracle.events.reverse()
    return "sent before an earlier event of the job"


def a_turn_that_was_taken(case: Aftermath) -> str:
    _alter(case, "UPDATE jobs SET seq = 9999 WHERE id = 'life0-first'")
    return "was offered before"


def a_job_that_was_never_booked(case: Aftermath) -> str:
    _alter(case, "UPDATE sqlite_sequence SET seq = seq + 1 WHERE name = 'jobs'")
    return "the ledger does not balance"


def a_slot_that_stayed_taken(case: Aftermath) -> str:
    path = case.home / "report-last.json"
    path.write_text(path.read_text().replace('"taken": 0', '"taken": 1'))
    return "left behind"


PLANTS = [
    a_lost_job,
    a_job_that_never_ends,
    a_final_state_that_was_left,
    a_transition_without_its_event,
    a_token_that_did_not_grow,
    a_job_that_was_not_charged,
    credits_that_were_lost,
    a_job_that_ran_twice,
    a_slot_that_held_two,
    an_end_that_was_not_notified,
    a_step_that_was_not_sent,
    an_unexpected_message,
    an_event_that_a_webhook_did_not_get,
    events_that_were_sent_in_another_order,
    a_turn_that_was_taken,
    a_job_that_was_never_booked,
    a_slot_that_stayed_taken,
]


def _alter(case: Aftermath, statement: str) -> None:
    with closing(sqlite3.connect(case.home / "record.db")) as record, record:
        record.execute(statement)


# -- the rules -------------------------------------------------------------------------------------------------


def test_a_life_without_a_crash_does_everything_once_and_passes_every_point(whole_life):
    assert problems(whole_life) == []
    assert sorted(set(POINTS) - whole_life.passed.keys()) == []
    assert set(whole_life.oracle.runs.values()) == {1}
    assert len(whole_life.oracle.hooks) == len({webhook for webhook, _ in whole_life.oracle.hooks}) > 0


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_each_planted_fault_is_found(whole_life, plant):
    """Each planted fault breaks one of the rules below, and the problems name it in the fault's own words."""
    assert problems(whole_life) == []
    words = plant(whole_life)
    assert [problem for problem in problems(whole_life) if words in problem] != []


@pytest.mark.parametrize("case", [(point,) for point in POINTS], ids="-".join)
def test_a_death_at_any_point_loses_and_doubles_nothing(cases, case):
    _expect_deaths_and_no_problem(cases, case)


@pytest.mark.postgres
@pytest.mark.parametrize("postgres_case", [(point,) for point in POINTS], ids="-".join)
def test_a_death_at_any_point_loses_and_doubles_nothing_on_postgresql(postgres_cases, postgres_case):
    _expect_deaths_and_no_problem(postgres_cases, postgres_case)


@pytest.mark.parametrize("case", PAIRS, ids="-".join)
def test_a_death_during_the_recovery_from_another_loses_and_doubles_nothing(cases, case):
    _expect_deaths_and_no_problem(cases, case)


def test_a_death_at_any_later_passing_of_a_point_loses_and_doubles_nothing(cases):
    """The first job to pass a point is seldom the hardest: it is passed by retries, cancels and revivals too."""
    whole, _ = cases.ask(("",)).result()
    passings: list[Case] = []
    for point, times in sorted(whole.passed.items()):
        passings += [(f"{point}:{n}",) for n in range(2, times + 1)]
    assert len(passings) > _SAMPLE
    chosen = passings if _ALL else random.Random(_SEED).sample(passings, _SAMPLE)
    ends = {case: future.result() for case, future in [(case, cases.ask(case)) for case in chosen]}
    assert {case: found for case, (_, found) in ends.items() if found} == {}
    # How often a point is passed depends a little on what falls due together, so a few may never come to it.
    survived = [case for case, (after, _) in ends.items() if after.ended[0].code != -signal.SIGKILL]
    assert len(survived) <= len(chosen) // 10, survived


def test_a_crash_point_works_in_a_process_that_is_configured_only_by_its_environment(lanes, tmp_path):
    lane = lanes.get()
    try:
        lane.prepare(tmp_path)
        env = {**os.environ, **lane.env(tmp_path, "life0", "run_sent:2")}
        died = subprocess.run(
            [sys.executable, "-m", "tests.system.faults.life", "story"], cwd=REPO, env=env, timeout=60
        )
        assert died.returncode == -signal.SIGKILL
        record = env["SLOTKEEPER_DATABASE_URL"]
        # A run that has ended is stored as running until its end is written.
        assert 1 <= len(ended(record, "life0", died.returncode).running) <= 2
    finally:
        lanes.put(lane)


def _expect_deaths_and_no_problem(cases: Cases, case: Case) -> None:
    aftermath, found = cases.ask(case).result()
    died = [life.code for life in aftermath.ended[:-1]]
    assert died == [-signal.SIGKILL] * len(case), f"a point was not reached: {died}\n{aftermath.log}"
    assert found == [], aftermath.log


# -- what must be true in the end --------------------------------------------------------------------------------


def problems(case: Aftermath) -> list[str]:
    """Return all violations after a case's last life; an empty list: no job was lost, doubled or left behind."""
    if case.ended[-1].code != 0:
        return [f"the last life ended with {case.ended[-1].code}"]
    with closing(Database(case.record)) as database:
        store = JobStore(database)
        found = {job.id: job for job in job_list.find_jobs(store.database, limit=1000)}
        timelines = {job: [event for event in store.list_events(job) if event.type in STEPS] for job in found}
        return [
            *_lost(case, found),
            *(problem for job in found.values() for problem in _illegal(job, timelines[job.id])),
            *_doubled(case, found),
            *_wrong_messages(case, database, found),
            *_wrong_events(case, database, found),
            *_broken_chains(case, found),
            *_out_of_order(case, found, timelines),
            *_miscounted(database, found),
            *_left_behind(case, database),
        ]


def _lost(case: Aftermath, found: dict[str, Job]) -> Iterator[str]:
    """Each accepted job is in the database, and each job there has ended."""
    for line in read_lines(case.home / "told"):
        if line["id"] not in found:
            yield f"{line['id']} was accepted and is lost"
    for job in found.values():
        if job.state not in FINAL_STATES:
            yield f"{job.id} is {job.state} for ever"


def _illegal(job: Job, trail: list[Event]) -> Iterator[str]:
    """JOB-1, JOB-2, LEASE-2: one event for each transition, each an edge of the table, tokens that grow."""
    state: State | None = None
    starts, spent = 0, dict.fromkeys(Budget, 0)
    for event in trail:
        edge = TRANSITIONS.get((state, Reason(event.data["why"])))
        if edge is None or EVENT_TYPES[edge.to] != event.type:
            yield f"{job.id}: no way leads from {state} by {event.data['why']} to {event.type}"
            return
        if edge.to is State.RUNNING:
            starts += 1
        if event.attempt != starts:
            yield f"{job.id}: {event.type} carries the token {event.attempt} after {starts} starts"
        if state is State.DEAD:
            spent[Budget.FAILURES] = spent[Budget.CRASHES] = 0
        state = edge.to
        spent[edge.costs] += 1
    stored = (job.state, job.attempt, job.waits, job.failures, job.crashes)
    expected = (state, starts, spent[Budget.WAITS], spent[Budget.FAILURES], spent[Budget.CRASHES])
    if stored != expected:
        yield f"{job.id} stands at {stored}, its events say {expected}"


def _miscounted(database: Database, found: dict[str, Job]) -> Iterator[str]:
    """CREDIT-1; and each job is charged once for each of its ends, and only for a run that its server ended."""
    for tenant, differences in credits.find_unbalanced(database, with_transfers=True).items():
        yield f"the credits of {tenant} do not balance: {differences}"
    for job in found.values():
        rows = credits.list_of_job(database, job.seq)
        kinds = [row.kind for row in rows]
        if job.reserved is not None and kinds != ["reserve", "settle"] * (len(kinds) // 2):
            yield f"{job.id} has the transfers {kinds}"
        if job.reserved is not None and not kinds:
            yield f"{job.id} holds credits without a transfer"
        charged = {row.why for row in rows if row.amount and row.kind == "settle"}
        if not charged <= CHARGED_ENDS:
            yield f"{job.id} is charged for {charged}"
    if found and not any(job.reserved for job in found.values()):
        yield "no job has cost anything"


def _doubled(case: Aftermath, found: dict[str, Job]) -> Iterator[str]:
    """A run is repeated only if its process died under it, and never if the server's own id was known."""
    for job in found.values():
        may_repeat = sum(job.id in life.running and life.running[job.id] is None for life in case.ended[:-1])
        runs = case.oracle.runs[job.id]
        if runs > 1 + may_repeat:
            yield f"{job.id} ran {runs} times, and {may_repeat} deaths explain a repetition"
        if job.state is State.COMPLETED and not runs:
            yield f"{job.id} is completed and never ran"
    if case.oracle.most_at_once > SLOTS:
        yield f"{case.oracle.most_at_once} runs at once on {SLOTS} slots"


def _wrong_events(case: Aftermath, database: Database, found: dict[str, Job]) -> Iterator[str]:
    """HOOK-1: a tenant's webhook gets each transition at least once, and those of a job in their order."""
    with database.read() as connection:
        (first,) = connection.execute(select(receivers.c.after_event)).scalars()
        later = select(events).where(events.c.id > first, events.c.type.in_(STEPS))
        happened = connection.execute(later.order_by(events.c.id)).all()
    received: dict[str, int] = {}
    for place, (message, _) in enumerate(case.oracle.events):
        received.setdefault(message, place)
    last: dict[str, int] = {}
    for event in (event for event in happened if event.job_id in found):
        place = received.get(message_id(event.id, event.at_ms))
        if place is None:
            yield f"{event.job_id} {event.type}: no webhook got it"
        elif place < last.get(event.job_id, -1):
            yield f"{event.job_id} {event.type}: sent before an earlier event of the job"
        else:
            last[event.job_id] = place


def _wrong_messages(case: Aftermath, database: Database, found: dict[str, Job]) -> Iterator[str]:
    """HOOK-1: each end is sent at least once, under one id, and no other message is sent."""
    with database.read() as connection:
        ended = select(events).join(jobs, jobs.c.id == events.c.job_id).where(jobs.c.callback_url.is_not(None))
        rows = connection.execute(ended.where(events.c.type.in_(_ENDS))).all()
        left = connection.execute(select(messages).where(messages.c.receiver == messages.c.job_id)).all()
    expected = {ends.make_message_id(row.job_id, ends.make_end_number(row.attempt, _ENDS[row.type])) for row in rows}
    received = dict(case.oracle.hooks)
    yield from (f"{webhook} was expected and never sent" for webhook in expected - received.keys())
    yield from (f"{webhook} was sent and is not expected" for webhook in received.keys() - expected)
    yield from (f"the message of {row.job_id} is {row.state}" for row in left)
    for job in found.values():
        message = received.get(f"msg_{job.id}_{job.attempt}_{job.state}")
        if job.callback_url and (message is None or (message["job_id"], message["status"]) != (job.id, job.state)):
            yield f"{job.id}: the client got {message}"


def _broken_chains(case: Aftermath, found: dict[str, Job]) -> Iterator[str]:
    """The next step of a chain exists, even if a process died after the end of the former step."""
    for wish in (wish for wish in read_lines(case.home / "asked") if "batch" not in wish):
        if wish["id"] in found and "next" in wish and wish["next"] not in found:
            yield f"{wish['next']} follows {wish['id']} and was never sent"


def _out_of_order(case: Aftermath, found: dict[str, Job], timelines: dict[str, list[Event]]) -> Iterator[str]:
    """ORDER-1, by the numbers of the offers, among first starts that nothing has disturbed: no death, no emptied
    Redis, no delay, no offer that was made again."""
    breaks = [life.last_event for life in case.ended] + [
        line["last_event"] for line in read_lines(case.home / "emptied")
    ]
    undisturbed: dict[tuple[str, int, int], list[tuple[int, int, str]]] = {}
    for job in found.values():
        trail = timelines[job.id]
        first = next((event for event in trail if event.type == EVENT_TYPES[State.RUNNING]), None)
        if first is None or trail[1] is not first or not first.data["offer"]:
            continue
        span = sum(last < trail[0].id for last in breaks)
        if span == sum(last < first.id for last in breaks):
            undisturbed.setdefault((job.model, job.priority, span), []).append((job.seq, first.data["offer"], job.id))
    for lane in undisturbed.values():
        for (_, earlier, one), (_, later, other) in pairwise(sorted(lane)):
            if earlier > later:
                yield f"{other} was offered before {one}"


def _left_behind(case: Aftermath, database: Database) -> Iterator[str]:
    """JOB-3, QUEUE-1, LEASE-1, SLOT-2: the ledger balances, the queue is empty, every slot is free."""
    if not ledger.read(database).balanced:
        yield f"the ledger does not balance: {ledger.read(database)}"
    report = case.report()
    expected = {"open": True, "slots": SLOTS, "taken": 0, "waiting": {}, "leases": 0, "findings": []}
    if {name: report[name] for name in expected} != expected:
        yield f"left behind: {report}"
