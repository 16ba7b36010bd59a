"""The fan-out sends each receiver each event that it wants once, in the order of each job, also after failures."""

from typing import Any

import pytest
from sqlalchemy import func, select, update

from slotkeeper import audit
from slotkeeper.db import Database
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.jobs.notifications import SECRET_OVERLAP_MS
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import events
from slotkeeper.jobs.tables import messages as rows
from slotkeeper.outbox import fan_out, retention
from slotkeeper.outbox.fan_out import EventFanOut
from slotkeeper.outbox.redelivery import MOST_TESTS, Redelivery
from slotkeeper.outbox.subscriptions import (
    FAILURES_TO_OPEN,
    LONGEST_COOLDOWN_MS,
    REASON_SILENT,
    Subscription,
    Subscriptions,
    cooldown_ms,
    get_cursor,
    new_id,
)
from slotkeeper.outbox.tables import receivers as table
from slotkeeper.outbox.tables import tries
from slotkeeper.outbox.webhook_messages import (
    LONGEST_ANSWER,
    TEST_TYPE,
    DeliveryResult,
    Message,
    MessageKey,
    MessageQueue,
)
from tests.support.builders import SECOND, T0, a_queued_job, a_running_job, a_start, an_ended_job, at_once
from tests.support.ends import store_end
from tests.support.unread_events import count_unread_events

HOUR = 3600 * SECOND
DAY = 24 * HOUR
ENDS = frozenset({"job.completed", "job.failed", "job.expired", "job.canceled", "job.dlq"})
ALL = ENDS | {"job.enqueued", "job.started", "job.delayed"}
YES = DeliveryResult(True, 200, 5)
NO = DeliveryResult(False, 500, 5, "https://client.example answered 500.", "oh no")


@pytest.fixture
def receivers(database: Database) -> Subscriptions:
    return Subscriptions(database)


@pytest.fixture
def messages(database: Database) -> MessageQueue:
    return MessageQueue(database)


@pytest.fixture
def redelivery(database: Database) -> Redelivery:
    return Redelivery(database)


@pytest.fixture
def spread(database: Database) -> EventFanOut:
    return EventFanOut(database)


def a_receiver(receivers: Subscriptions, *, most: int = 100, **changes: Any) -> Subscription:
    values: dict[str, Any] = {
        "id": new_id(),
        "tenant": "default",
        "url": "https://client.example/hook",
        "types": ENDS,
        "sealed": "sealed",
        "created_ms": T0,
        **changes,
    }
    return receivers.add(Subscription(**values), most)


def all_steps(spread: EventFanOut, now_ms: int = T0) -> None:
    while spread.step(now_ms):
        pass


def pending(database: Database, receiver: Subscription) -> list[tuple[str, str]]:
    query = select(rows.c.job_id, rows.c.type).where(rows.c.receiver == receiver.id, rows.c.state == "pending")
    with database.read() as connection:
        return [(row.job_id, row.type) for row in connection.execute(query.order_by(rows.c.event))]


def outcomes(database: Database, receiver: Subscription) -> list[str]:
    with database.read() as connection:
        query = select(tries.c.outcome).where(tries.c.receiver == receiver.id).order_by(tries.c.id)
        return list(connection.execute(query).scalars())


def claimed(messages: MessageQueue, receiver: Subscription, now_ms: int = T0, limit: int = 100) -> list[Message]:
    wanted = [MessageKey(receiver.id, event) for event in messages.list_due(receiver.id, now_ms, limit)]
    return messages.claim(wanted, now_ms, now_ms + 20 * SECOND)


def deliver(
    messages: MessageQueue, spread: EventFanOut, receiver: Subscription, now_ms: int = T0
) -> list[tuple[str, str]]:
    """Deliver all due messages; return (job id, event type) of each, in order."""
    sent: list[tuple[str, str]] = []
    while True:
        made = spread.step(now_ms)
        found = claimed(messages, receiver, now_ms)
        for message in found:
            messages.note_delivered(message, messages.subscriptions.get(receiver.id), YES, now_ms)
            sent.append((message.job_id, message.type))
        if not found and not made:
            return sent


# -- from events to messages ---------------------------------------------------------------------------------------


def test_a_receiver_gets_only_later_events_of_its_tenant_and_of_its_event_types(
    database, store, receivers, spread
) -> None:
    an_ended_job(store)
    mine = a_receiver(receivers)
    theirs = a_receiver(receivers, tenant="acme", types=frozenset({"job.started"}))
    done = an_ended_job(store)
    dead = an_ended_job(store, State.DEAD)
    run = a_running_job(store, tenant="acme")
    all_steps(spread)
    assert pending(database, mine) == [(done.id, "job.completed"), (dead.id, "job.dlq")]
    assert pending(database, theirs) == [(run.job.id, "job.started")]


def test_without_receivers_no_event_is_read_and_a_new_receiver_gets_no_earlier_event(
    database, store, receivers, spread, monkeypatch
) -> None:
    for _ in range(3):
        an_ended_job(store)
    with monkeypatch.context() as closed:
        closed.setattr(spread._reader, "read", lambda *_: pytest.fail("the fan-out reads events without a receiver"))
        assert spread.step(T0) == 0
    receiver = a_receiver(receivers)
    job = an_ended_job(store)
    read: list[int] = []
    original = spread._reader.read
    monkeypatch.setattr(spread._reader, "read", lambda *args: read.append(spread._reader.position) or original(*args))
    all_steps(spread)
    assert pending(database, receiver) == [(job.id, "job.completed")]
    assert read[0] == receiver.after_event > 0, "the events before the first receiver are skipped"


def test_several_processes_make_each_message_once(database, store, receivers) -> None:
    receiver = a_receiver(receivers, types=ALL)
    jobs = [an_ended_job(store).id for _ in range(30)]
    at_once(*(lambda: all_steps(EventFanOut(database)) for _ in range(4)))
    all_steps(EventFanOut(database))
    assert sorted(pending(database, receiver)) == sorted(
        (job, type_) for job in jobs for type_ in ("job.enqueued", "job.started", "job.completed")
    )


def test_a_slow_process_creates_no_message_that_another_process_has_created_and_sent(
    database, store, receivers, messages, spread, monkeypatch
) -> None:
    receiver = a_receiver(receivers)
    an_ended_job(store)
    spread.step(T0)
    an_ended_job(store)

    def meanwhile() -> None:
        assert len(deliver(messages, EventFanOut(database), receiver)) == 2

    monkeypatch.setattr(spread._database, "write", _after(meanwhile, database.write))
    assert spread.step(T0) == 0
    monkeypatch.undo()
    assert pending(database, receiver) == [] and deliver(messages, spread, receiver) == []


def test_a_process_that_dies_between_the_events_and_the_messages_has_passed_nothing_over(
    database, store, receivers, monkeypatch
) -> None:
    receiver = a_receiver(receivers)
    job = an_ended_job(store)
    dying = EventFanOut(database)
    with monkeypatch.context() as dies:
        dies.setattr(fan_out, "enqueue", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dying.step(T0)
    all_steps(EventFanOut(database))
    assert pending(database, receiver) == [(job.id, "job.completed")]


def test_a_step_writes_for_a_bounded_number_of_receivers_and_first_for_one_of_each_tenant(
    database, store, receivers, spread, monkeypatch
) -> None:
    monkeypatch.setattr(fan_out, "_MAX_WEBHOOKS", 3)
    many = [a_receiver(receivers, tenant="greedy") for _ in range(8)]
    one = a_receiver(receivers)
    theirs, mine = an_ended_job(store, tenant="greedy"), an_ended_job(store)
    spread._process_new(T0)
    assert pending(database, one) == [(mine.id, "job.completed")]
    assert sum(len(pending(database, webhook)) for webhook in many) == 2
    all_steps(spread)
    assert [pending(database, webhook) for webhook in many] == [[(theirs.id, "job.completed")]] * 8
    assert all(webhook.behind is None for webhook in receivers.list_of_tenant())


def test_a_replay_that_starts_while_its_receiver_falls_behind_is_kept(
    database, database_url, store, receivers, spread, monkeypatch
) -> None:
    if database_url.startswith("sqlite"):
        pytest.skip("one process at a time writes to SQLite")
    receiver = a_receiver(receivers)
    first = an_ended_job(store)
    all_steps(spread)
    an_ended_job(store)
    other = Database(database_url)

    def full(*_: object) -> bool:
        at_once(lambda: Redelivery(other).replay(receiver, 0))
        return False

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(fan_out, "_has_capacity", full)
        spread._process_new(T0)
    other.close()
    with database.read() as connection:
        first_event = connection.execute(select(func.min(events.c.id)).where(events.c.job_id == first.id)).scalar()
    assert receivers.get(receiver.id).behind < first_event


def test_a_receiver_that_joins_the_shared_cursor_while_the_cursor_skips_events_misses_no_event(
    database, store, receivers, spread, monkeypatch
) -> None:
    late = a_receiver(receivers)
    an_ended_job(store)
    all_steps(spread)
    with database.read() as connection:
        here = get_cursor(connection)
    database.write(lambda tx: tx.connection.execute(update(table).where(table.c.id == late.id).values(behind=here)))
    missed = an_ended_job(store)
    a_receiver(receivers)
    write, other = database.write, EventFanOut(database)

    def joined_first(unit: Any, **how: Any) -> Any:
        monkeypatch.setattr(database, "write", write)
        assert other._catch_up(receivers.get(late.id), T0) == 0
        assert receivers.get(late.id).behind is None, "it has joined the shared cursor"
        return write(unit, **how)

    monkeypatch.setattr(database, "write", joined_first)
    spread._begin()
    all_steps(spread)
    assert (missed.id, "job.completed") in pending(database, late)


def test_the_replays_of_one_tenant_take_a_bounded_part_of_a_step(
    database, store, receivers, spread, monkeypatch
) -> None:
    many = [a_receiver(receivers, tenant="greedy") for _ in range(5)]
    an_ended_job(store)
    all_steps(spread)
    for webhook in many:
        Redelivery(database).replay(webhook, 0)
    asked: list[str] = []
    catch_up = spread._catch_up
    monkeypatch.setattr(spread, "_catch_up", lambda webhook, now: asked.append(webhook.id) or catch_up(webhook, now))
    monkeypatch.setattr(fan_out, "_CATCH_UP_S", 0.0)
    for n in range(1, 6):
        spread.step(T0)
        assert len(asked) == n, "one replay a step, when it uses the whole time slice"
    assert len(set(asked)) == 5, "each receiver gets its turn"


def test_a_page_without_matching_events_does_not_stop_the_fan_out(
    database, store, receivers, spread, monkeypatch
) -> None:
    monkeypatch.setattr(fan_out, "_PAGE", 3)
    receiver = a_receiver(receivers)
    for _ in range(4):
        an_ended_job(store, tenant="acme")
    mine = an_ended_job(store)
    while spread.step(T0) or spread.has_more:
        pass
    assert pending(database, receiver) == [(mine.id, "job.completed")]


def test_a_url_that_is_gone_disables_only_a_receiver_that_still_has_this_url(receivers) -> None:
    receiver = a_receiver(receivers)
    receivers.change(receiver.id, None, url="https://new.example/hook")
    assert not receivers.disable_if_url(receiver.url, receiver.id, "It is gone.", T0)
    assert receivers.get(receiver.id).enabled
    assert receivers.disable_if_url("https://new.example/hook", receiver.id, "It is gone.", T0)
    shown = receivers.get(receiver.id)
    assert (shown.enabled, shown.reason, shown.changed_by) == (False, "It is gone.", None)
    receivers.remove(receiver.id, None)
    assert not receivers.disable_if_url("https://new.example/hook", receiver.id, "It is gone.", T0)


# -- order and claims ----------------------------------------------------------------------------------------------


def test_messages_of_one_job_are_sent_in_sequence_and_do_not_delay_those_of_other_jobs(
    store, receivers, messages, spread
) -> None:
    receiver = a_receiver(receivers, types=ALL)
    one, other = an_ended_job(store), an_ended_job(store)
    all_steps(spread)
    first = claimed(messages, receiver)
    assert [(message.job_id, message.type) for message in first] == [
        (one.id, "job.enqueued"),
        (other.id, "job.enqueued"),
    ]
    assert claimed(messages, receiver) == []
    messages.note_delivered(first[1], receiver, YES, T0)
    assert [(message.job_id, message.type) for message in claimed(messages, receiver)] == [(other.id, "job.started")]


def test_later_messages_of_a_job_wait_for_its_failed_message(store, receivers, messages, spread) -> None:
    receiver = a_receiver(receivers, types=ALL)
    an_ended_job(store)
    all_steps(spread)
    (message,) = claimed(messages, receiver)
    messages.note_failed(message, receiver, NO, T0, T0 + 60 * SECOND)
    assert messages.list_due(receiver.id, T0 + 59 * SECOND, 10) == []
    assert messages.list_ready(T0 + 59 * SECOND, 10) == [], "the messages behind the failed one are not read in vain"
    assert messages.list_due(receiver.id, T0 + 60 * SECOND, 10) == [message.event]


def test_one_process_claims_a_message_and_the_outcome_of_an_expired_try_is_ignored(
    database, store, receivers, messages, spread
) -> None:
    receiver = a_receiver(receivers)
    an_ended_job(store)
    all_steps(spread)
    found = at_once(*(lambda: claimed(messages, receiver) for _ in range(4)))
    (slow,) = [message for batch in found for message in batch]
    (quick,) = claimed(messages, receiver, T0 + 20 * SECOND)
    assert (slow.id, slow.tries, quick.tries) == (quick.id, 1, 2)
    messages.note_failed(slow, receiver, NO, T0, None)
    messages.note_delivered(slow, receiver, YES, T0)
    assert pending(database, receiver) and outcomes(database, receiver) == []
    messages.note_delivered(quick, receiver, YES, T0)
    assert pending(database, receiver) == [] and outcomes(database, receiver) == ["delivered"]


def test_a_message_keeps_its_id_and_no_two_have_the_same(database, store, receivers, messages, spread) -> None:
    receiver = a_receiver(receivers, types=ALL)
    an_ended_job(store)
    all_steps(spread)
    ids = {Message(**row._asdict()).id for row in _all(database)}
    assert len(ids) == 3
    (message,) = claimed(messages, receiver)
    messages.note_failed(message, receiver, NO, T0, T0)
    (again,) = claimed(messages, receiver)
    assert message.id == again.id in ids


def _all(database: Database) -> list[Any]:
    with database.read() as connection:
        return list(connection.execute(select(rows)))


# -- pace ----------------------------------------------------------------------------------------------------------


def _paced(
    store: JobStore, receivers: Subscriptions, spread: EventFanOut, max_per_s: float | None, jobs: int = 10
) -> Subscription:
    """Return a receiver with a rate limit and pending messages."""
    receiver = a_receiver(receivers, max_per_s=max_per_s)
    for _ in range(jobs):
        an_ended_job(store)
    all_steps(spread)
    return receiver


def test_several_processes_send_messages_at_the_rate_limit_of_the_receiver(
    database, store, receivers, messages, spread
) -> None:
    receiver, unpaced = _paced(store, receivers, spread, 4), a_receiver(receivers)
    due, another = messages.list_due(receiver.id, T0, 64), MessageQueue(database)
    sent: list[int] = []
    for n, event in enumerate(due):
        process = (messages, another)[n % 2]
        sent += [message.send_ms for message in process.claim([MessageKey(receiver.id, event)], T0, T0 + 20 * SECOND)]
    assert sent == [T0 + ms for ms in (0, 250, 500, 750, 1000)], "and none is held for longer than a second"
    assert [message.receiver for message in messages.list_ready(T0 + 249, 10)] == [], (
        "the receiver is not listed before its next message may be sent"
    )
    (later,) = claimed(messages, receiver, T0 + 250, limit=1)
    assert later.send_ms == T0 + 1250
    an_ended_job(store)
    all_steps(spread)
    assert len(claimed(messages, unpaced)) == 1, "others do not wait"


def test_concurrent_claims_share_the_rate_limit_of_the_receiver(database, store, receivers, messages, spread) -> None:
    receiver = _paced(store, receivers, spread, 10)
    found = at_once(*(lambda: claimed(MessageQueue(database), receiver) for _ in range(4)))
    sent = sorted(message.send_ms for batch in found for message in batch)
    assert sent == [T0 + 100 * n for n in range(len(sent))] and len(sent) == 10


def test_a_claim_that_finds_no_message_does_not_count_toward_the_rate(store, receivers, messages, spread) -> None:
    receiver = _paced(store, receivers, spread, 1, jobs=2)
    (first,) = claimed(messages, receiver, limit=1)
    assert messages.claim([MessageKey(receiver.id, first.event)], T0, T0 + 20 * SECOND) == []
    (second,) = claimed(messages, receiver)
    assert (first.send_ms, second.send_ms) == (T0, T0 + SECOND)


def test_an_unused_send_rate_is_not_saved_up(store, receivers, messages, spread) -> None:
    receiver = _paced(store, receivers, spread, 1)
    assert [message.send_ms for message in claimed(messages, receiver)] == [T0, T0 + SECOND]
    later = T0 + 60 * SECOND
    assert [message.send_ms for message in claimed(messages, receiver, later)] == [later, later + SECOND]


def test_a_changed_rate_applies_at_once(store, receivers, messages, spread) -> None:
    receiver = _paced(store, receivers, spread, 0.1)
    assert len(claimed(messages, receiver)) == 1
    assert claimed(messages, receiver, T0 + 8 * SECOND) == []
    receivers.change(receiver.id, None, max_per_s=None)
    assert len(claimed(messages, receiver, T0 + 8 * SECOND)) == 9


# -- receivers that fail -------------------------------------------------------------------------------------------


def _break(messages: MessageQueue, receiver: Subscription, now_ms: int = T0) -> Subscription:
    for _ in range(FAILURES_TO_OPEN):
        messages.subscriptions.note_failure(messages.subscriptions.get(receiver.id), now_ms)
    return messages.subscriptions.get(receiver.id)


def test_a_receiver_that_fails_is_tried_by_one_message_at_a_time_and_less_and_less_often(
    store, receivers, messages, spread
) -> None:
    receiver = a_receiver(receivers)
    for _ in range(5):
        an_ended_job(store)
    all_steps(spread)
    receiver = _break(messages, receiver)
    assert claimed(messages, receiver, receiver.open_until_ms - 1) == []
    trials = claimed(messages, receiver, receiver.open_until_ms)
    assert len(trials) == 1, "only one tries whether it is back"
    assert cooldown_ms(T0, T0 + 4 * 60_000) == 60_000 and cooldown_ms(T0, T0 + DAY) == LONGEST_COOLDOWN_MS


def _refuse(messages: MessageQueue, receiver: Subscription, job_id: str, now_ms: int) -> None:
    """Let the message of a job fail, whatever else is due."""
    with messages.database.read() as connection:
        event = connection.execute(select(rows.c.event).where(rows.c.job_id == job_id)).scalar_one()
    (message,) = messages.claim([MessageKey(receiver.id, event)], now_ms, now_ms + 20 * SECOND)
    current = messages.subscriptions.get(receiver.id)
    messages.note_failed(message, current, DeliveryResult(False, 413, 5, "too large"), now_ms, now_ms + SECOND)


def test_a_message_that_is_refused_repeatedly_delays_no_other_message(
    database, store, receivers, messages, spread
) -> None:
    """Its attempts count as one failure: the breaker stays closed, and later messages are sent."""
    receiver = a_receiver(receivers)
    large = an_ended_job(store).id
    all_steps(spread)
    for n in range(2 * FAILURES_TO_OPEN):
        _refuse(messages, receiver, large, T0 + n * 20 * SECOND)
    found = receivers.get(receiver.id)
    assert not found.breaker_is_open and found.failures == 1
    small = [an_ended_job(store).id for _ in range(3)]
    all_steps(spread, T0 + HOUR)
    assert [job for job, _ in pending(database, receiver)] == [large, *small]
    assert {one.job_id for one in claimed(messages, receiver, T0 + HOUR)} == {large, *small}


def test_a_refused_message_does_not_count_toward_the_limit_of_pending_messages(
    database, store, receivers, messages, spread, monkeypatch
) -> None:
    monkeypatch.setattr(fan_out, "MOST_PENDING", 2)
    receiver = a_receiver(receivers)
    refused = [an_ended_job(store).id for _ in range(2)]
    all_steps(spread)
    for job_id in refused:
        _refuse(messages, receiver, job_id, T0)
        messages.subscriptions.note_success(messages.subscriptions.get(receiver.id))
    late = an_ended_job(store).id
    all_steps(spread, T0 + HOUR)
    assert [job for job, _ in pending(database, receiver)] == [*refused, late]


def test_the_trial_of_an_open_breaker_is_a_message_that_was_never_tried(
    database, store, receivers, messages, spread
) -> None:
    receiver = a_receiver(receivers)
    refused = [an_ended_job(store).id for _ in range(FAILURES_TO_OPEN)]
    all_steps(spread)
    for n, job_id in enumerate(refused):
        _refuse(messages, receiver, job_id, T0 + n * 30 * SECOND)
    receiver = receivers.get(receiver.id)
    assert receiver.breaker_is_open
    good = an_ended_job(store).id
    now = receiver.open_until_ms
    all_steps(spread, now)
    assert good in [job for job, _ in pending(database, receiver)], "one that was refused stands in nobody's way"
    (ready,) = messages.list_ready(now, 10)
    (event,) = messages.list_due(receiver.id, now, ready.most, is_trial=ready.is_trial)
    (trial,) = messages.claim([MessageKey(receiver.id, event)], now, now + SECOND)
    assert trial.job_id == good
    messages.note_delivered(trial, receiver, YES, now)
    assert not receivers.get(receiver.id).breaker_is_open


def test_unwritten_messages_are_counted_and_a_refused_message_is_reported(store, receivers, messages, spread) -> None:
    receiver = _break(messages, a_receiver(receivers))
    jobs = [an_ended_job(store).id for _ in range(3)]
    all_steps(spread)
    assert receivers.count_pending([receiver.id]) == {}
    assert fan_out.count_unwritten(messages.database, [receivers.get(receiver.id)]) == {receiver.id: 3}
    all_steps(spread, receiver.open_until_ms)
    _refuse(messages, receiver, jobs[0], receiver.open_until_ms)
    refused = receivers.find_refused([receiver.id])[receiver.id]
    assert (refused.job_id, refused.tries, refused.last_status, refused.last_error) == (jobs[0], 1, 413, "too large")


def test_a_success_closes_the_breaker(receivers, messages) -> None:
    receiver = _break(messages, a_receiver(receivers))
    assert receiver.breaker_is_open and receiver.failing_since_ms == T0
    receivers.note_success(receiver)
    well = receivers.get(receiver.id)
    assert (well.failures, well.failing_since_ms, well.open_until_ms) == (0, None, 0)


def test_a_receiver_gets_no_message_during_the_cooldown_that_it_requested(store, receivers, messages, spread) -> None:
    receiver = a_receiver(receivers)
    for _ in range(2):
        an_ended_job(store)
    all_steps(spread)
    (message,) = claimed(messages, receiver, limit=1)
    messages.note_failed(
        message, receiver, DeliveryResult(False, 429, 5, "too many", cooldown_ms=90 * SECOND), T0, T0 + SECOND
    )
    assert messages.list_ready(T0 + 89 * SECOND, 10) == []
    assert claimed(messages, receiver, T0 + 89 * SECOND) == []
    assert len(claimed(messages, receiver, T0 + 90 * SECOND)) == 2


def test_a_receiver_that_was_down_for_a_day_gets_all_events_in_the_order_of_each_job(
    database, store, receivers, messages, spread, monkeypatch
) -> None:
    monkeypatch.setattr(fan_out, "MOST_PENDING", 20)
    receiver = a_receiver(receivers, types=ALL)
    wanted: list[tuple[str, str]] = []
    now = T0
    for n in range(240):  # one job each six minutes
        now = T0 + n * DAY // 240
        job = an_ended_job(store, now_ms=now)
        wanted += [(job.id, type_) for type_ in ("job.enqueued", "job.started", "job.completed")]
        spread.step(now)
        for message in claimed(messages, receivers.get(receiver.id), now):
            messages.note_failed(message, receivers.get(receiver.id), NO, now, now + 900 * SECOND)
        retention.trim(messages.database, [receiver.id], now, 3 * DAY)
    assert len(pending(database, receiver)) <= 20 + 3, "its backlog is kept as events, not as messages"
    assert receivers.get(receiver.id).breaker_is_open
    sent: list[tuple[str, str]] = []
    for _ in range(100):  # The receiver answers again.
        now += LONGEST_COOLDOWN_MS
        sent += deliver(messages, spread, receivers.get(receiver.id), now)
    assert sorted(sent) == sorted(wanted), "everything, and nothing twice"
    for job in {job for job, _ in wanted}:
        assert [type_ for job_id, type_ in sent if job_id == job] == ["job.enqueued", "job.started", "job.completed"]
    assert receivers.get(receiver.id).behind is None and not receivers.get(receiver.id).failures


def test_a_receiver_that_is_behind_joins_the_others_without_a_gap(
    database, store, receivers, messages, spread, monkeypatch
) -> None:
    """While it catches up the others go on."""
    receiver = _break(messages, a_receiver(receivers))
    other = a_receiver(receivers)
    wanted = [(an_ended_job(store).id, "job.completed") for _ in range(3)]
    all_steps(spread)
    assert receivers.get(receiver.id).behind is not None and pending(database, receiver) == []
    receivers.note_success(receiver)
    original = spread._database.read

    def late_write(*args: Any) -> Any:
        wanted.append((an_ended_job(store).id, "job.completed"))
        EventFanOut(database)._process_new(T0)
        return original(*args)

    (behind,) = spread._list_behind(T0)
    monkeypatch.setattr(spread._database, "write", _after(late_write, database.write))
    spread._catch_up(behind, T0)
    monkeypatch.undo()
    wanted.append((an_ended_job(store).id, "job.completed"))
    all_steps(spread)
    assert pending(database, receiver) == wanted == pending(database, other)


def _after(act: Any, write: Any) -> Any:
    """A write before which something else happens, once."""
    acts = [act]

    def written(*args: Any, **more: Any) -> Any:
        if acts:
            acts.pop()()
        return write(*args, **more)

    return written


def test_a_receiver_with_an_open_breaker_and_no_pending_message_gets_one_as_a_probe(
    database, store, receivers, messages, spread
) -> None:
    receiver = _break(messages, a_receiver(receivers))
    for _ in range(3):
        an_ended_job(store)
    all_steps(spread)
    assert pending(database, receiver) == []
    all_steps(spread, receiver.open_until_ms)
    assert len(pending(database, receiver)) == 1


def test_a_receiver_that_fails_for_days_is_disabled_and_its_pending_messages_are_given_up(
    database, store, receivers, messages, redelivery, spread
) -> None:
    receiver = a_receiver(receivers)
    an_ended_job(store)
    all_steps(spread)
    _break(messages, receiver)
    retention.trim(messages.database, [], T0 + 3 * DAY - 1, 3 * DAY)
    assert receivers.get(receiver.id).enabled
    retention.trim(messages.database, [], T0 + 3 * DAY + 1, 3 * DAY)
    assert receivers.get(receiver.id).reason == REASON_SILENT
    assert pending(database, receiver) == [] and len(redelivery.list_given_up_webhooks()) == 1


def test_a_given_up_message_is_not_sent_until_a_client_retries_it(
    database, store, receivers, messages, redelivery, spread
) -> None:
    receiver = a_receiver(receivers)
    job = an_ended_job(store)
    all_steps(spread)
    (message,) = claimed(messages, receiver)
    messages.note_failed(message, receiver, NO, T0, None)
    (given_up,) = redelivery.list_given_up_webhooks("default", receiver.id)
    assert (given_up.id, given_up.last_status, given_up.last_error) == (message.id, 500, NO.error)
    assert redelivery.list_given_up_webhooks("acme") == [] and deliver(messages, spread, receiver, T0 + DAY) == []
    assert redelivery.retry_webhook(receiver, T0 + DAY) == 1
    assert deliver(messages, spread, receiver, T0 + DAY) == [(job.id, "job.completed")]


# -- disabling and replay ------------------------------------------------------------------------------------------


def test_a_disabled_receiver_gets_no_event_and_after_it_is_enabled_all_that_it_missed(
    store, receivers, messages, spread
) -> None:
    receiver = a_receiver(receivers)
    before = an_ended_job(store)
    all_steps(spread)
    receivers.disable(receiver.id, None, "root", "moving house", T0)
    meanwhile = an_ended_job(store)
    a_receiver(receivers, tenant="acme")  # The others go on.
    assert deliver(messages, spread, receiver) == []
    receivers.enable(receiver.id, "default", "default", T0)
    later = an_ended_job(store)
    sent = deliver(messages, spread, receiver)
    assert sent == [(job.id, "job.completed") for job in (before, meanwhile, later)]


def test_a_replay_sends_all_events_since_a_time_once(store, receivers, messages, spread) -> None:
    jobs = [an_ended_job(store, now_ms=T0 + n * HOUR).id for n in range(10)]
    receiver = a_receiver(receivers)
    jobs.append(an_ended_job(store, now_ms=T0 + 10 * HOUR).id)
    assert [job for job, _ in deliver(messages, spread, receiver)] == jobs[10:]
    Redelivery(spread._database).replay(receiver, T0 + 7 * HOUR)
    assert [job for job, _ in deliver(messages, spread, receiver)] == jobs[7:]
    assert deliver(messages, spread, receiver) == []


def test_a_replay_of_one_event_reaches_only_receivers_of_its_tenant(store, receivers, messages, spread) -> None:
    receiver, other = a_receiver(receivers), a_receiver(receivers, tenant="acme")
    job = an_ended_job(store)
    all_steps(spread)
    (message,) = claimed(messages, receiver)
    messages.note_delivered(message, receiver, YES, T0)
    assert Redelivery(spread._database).replay_one(receiver, message.event, T0)
    assert not Redelivery(spread._database).replay_one(other, message.event, T0)
    assert deliver(messages, spread, other) == []
    (again,) = claimed(messages, receiver)
    assert (again.id, again.job_id) == (message.id, job.id)


def test_a_test_goes_first_and_is_tried_once(database, store, receivers, messages, redelivery, spread) -> None:
    receiver = _break(messages, a_receiver(receivers))
    an_ended_job(store)
    all_steps(spread)
    message_id = redelivery.send_test(receiver, T0 + 1)
    (test,) = claimed(messages, receivers.get(receiver.id), T0 + 1)
    assert (test.id, test.type, test.is_test) == (message_id, TEST_TYPE, True)
    messages.note_failed(test, receiver, NO, T0, None)
    assert redelivery.list_given_up_webhooks() == [] and outcomes(database, receiver) == ["given_up"]
    for n in range(MOST_TESTS):
        redelivery.send_test(receiver, T0 + n)
    with pytest.raises(Conflict, match="tests"):
        redelivery.send_test(receiver, T0)


# -- whose they are, and how many ----------------------------------------------------------------------------------


def test_a_tenant_cannot_access_receivers_of_another_tenant(receivers) -> None:
    mine, theirs = a_receiver(receivers), a_receiver(receivers, tenant="acme")
    assert [webhook.id for webhook in receivers.list_of_tenant("acme")] == [theirs.id] and len(
        receivers.list_of_tenant()
    ) == 2
    for act in (
        lambda: receivers.get(mine.id, "acme"),
        lambda: receivers.change(mine.id, "acme", url="https://evil.example/"),
        lambda: receivers.rotate_secret(mine.id, "acme", "other", T0),
        lambda: receivers.enable(mine.id, "acme", "acme", T0),
        lambda: receivers.disable(mine.id, "acme", "acme", None, T0),
        lambda: receivers.remove(mine.id, "acme"),
    ):
        with pytest.raises(NotFound):
            act()
    assert receivers.get(mine.id) == mine


def test_the_number_of_receivers_of_a_tenant_is_limited(receivers) -> None:
    for _ in range(3):
        a_receiver(receivers, most=3)
    with pytest.raises(Conflict, match="3 webhooks"):
        a_receiver(receivers, most=3)
    a_receiver(receivers, most=3, tenant="acme")


@pytest.mark.postgres
def test_a_tenants_limit_holds_for_processes_that_add_webhooks_at_the_same_time(postgres_url: str) -> None:
    processes = [Subscriptions(Database(postgres_url)) for _ in range(6)]
    refused: list[Conflict] = []

    def add(process: Subscriptions) -> None:
        try:
            a_receiver(process, most=1)
        except Conflict as error:
            refused.append(error)

    for process in processes:
        process.list_of_tenant()  # Each has its connection.
    at_once(*(lambda process=process: add(process) for process in processes))
    assert len(processes[0].list_of_tenant("default")) == 1 and len(refused) == 5


@pytest.mark.parametrize(
    ("act", "action"),
    [
        (lambda redelivery, receiver: redelivery.retry_webhook(receiver, T0), "webhook.replay"),
        (lambda redelivery, receiver: redelivery.replay_one(receiver, 2, T0), "webhook.replay"),
        (lambda redelivery, receiver: redelivery.replay(receiver, 0), "webhook.replay"),
        (lambda redelivery, receiver: redelivery.send_test(receiver, T0), "webhook.test"),
    ],
    ids=["given_up", "one", "since", "test"],
)
def test_each_request_to_resend_messages_is_in_the_audit_log(database, store, receivers, redelivery, act, action):
    receiver = a_receiver(receivers, types=ALL)
    a_queued_job(store)
    act(redelivery, receiver)
    newest = audit.find_entries(database, audit.AuditFilter())[0]
    assert (newest.act, newest.tenant, newest.data["webhook"]) == (action, receiver.tenant, receiver.id)


def test_the_removal_of_a_receiver_deletes_its_messages_and_its_log(
    database, store, receivers, messages, redelivery, spread
) -> None:
    receiver = a_receiver(receivers, types=ALL)
    an_ended_job(store)
    all_steps(spread)
    (message,) = claimed(messages, receiver)
    messages.note_delivered(message, receiver, YES, T0)
    (late,) = claimed(messages, receiver)
    receivers.remove(receiver.id, "default")
    messages.note_delivered(late, receiver, YES, T0)
    assert _all(database) == [] and redelivery.list_attempts(receiver.id) == []


def test_messages_are_also_signed_with_the_former_secret_for_a_day(receivers) -> None:
    receiver = a_receiver(receivers, sealed="one")
    receiver = receivers.rotate_secret(receiver.id, "default", "two", T0)
    assert receiver.list_sealed_secrets(T0 + SECRET_OVERLAP_MS - 1) == ["two", "one"] and receiver.list_sealed_secrets(
        T0 + SECRET_OVERLAP_MS
    ) == ["two"]
    assert receivers.rotate_secret(receiver.id, "default", "three", T0).list_sealed_secrets(T0) == ["three", "two"]


def test_the_log_and_the_list_of_given_up_messages_are_bounded(
    database, store, receivers, messages, redelivery, spread, monkeypatch
) -> None:
    monkeypatch.setattr(retention, "MOST_LOGGED", 3)
    monkeypatch.setattr(retention, "MOST_GIVEN_UP", 2)
    receiver = a_receiver(receivers)
    for _ in range(5):
        an_ended_job(store)
    all_steps(spread)
    for message in claimed(messages, receiver):
        messages.note_failed(message, receiver, NO, T0, None)
    kept = [webhook.event for webhook in redelivery.list_given_up_webhooks()][:2]
    retention.trim(messages.database, [receiver.id], T0, DAY)
    assert (
        len(redelivery.list_attempts(receiver.id)) == 3
        and [webhook.event for webhook in redelivery.list_given_up_webhooks()] == kept
    )
    retention.trim(messages.database, [receiver.id], T0 + retention.LOGGED_MS + 1, DAY)
    assert redelivery.list_attempts(receiver.id) == []


def test_the_response_of_a_receiver_is_stored_up_to_a_maximum_length(
    store, receivers, messages, redelivery, spread
) -> None:
    receiver = a_receiver(receivers)
    an_ended_job(store)
    all_steps(spread)
    (message,) = claimed(messages, receiver)
    messages.note_failed(message, receiver, DeliveryResult(False, 500, 7, "no", "\0\ud83d" + "x" * 10_000), T0, T0)
    (entry,) = redelivery.list_attempts(receiver.id)
    assert entry.answer is not None and len(entry.answer) <= LONGEST_ANSWER
    assert (entry.message, entry.status, entry.latency_ms, entry.number) == (message.id, 500, 7, 1)


def test_pages_of_given_up_messages_and_of_the_log_follow_each_other_without_gaps(
    store, receivers, messages, redelivery, spread
) -> None:
    some = [a_receiver(receivers) for _ in range(2)]
    for _ in range(3):
        an_ended_job(store)
    all_steps(spread)
    for receiver in some:
        for message in claimed(messages, receiver):
            messages.note_failed(message, receiver, NO, T0, None)
    whole = redelivery.list_given_up_webhooks()
    paged, before = [], None
    while page := redelivery.list_given_up_webhooks(before=before, limit=2):
        paged += page
        before = (page[-1].receiver, page[-1].event)
    assert paged == whole and len(whole) == 6
    log = redelivery.list_attempts(some[0].id)
    assert redelivery.list_attempts(some[0].id, before=log[0].id) == log[1:] and len(log) == 3


def test_how_much_is_untold_is_known(store, receivers, spread) -> None:
    an_ended_job(store)
    assert count_unread_events(receivers.database) == 0, "nobody wants to know"
    receiver = a_receiver(receivers)
    an_ended_job(store)
    assert count_unread_events(receivers.database) == 4, "they count with the act of adding it"
    assert receivers.count_pending([receiver.id]) == {}
    all_steps(spread)
    assert count_unread_events(receivers.database) == 0 and receivers.count_pending([receiver.id]) == {receiver.id: 1}


def test_each_change_of_a_webhook_is_audited_also_an_automatic_one(database, store, receivers, messages) -> None:
    receiver = a_receiver(receivers, tenant="acme")
    receivers.change(receiver.id, None, url="https://other.example/")
    receivers.rotate_secret(receiver.id, None, "two", T0)
    _break(messages, receiver)
    retention.trim(messages.database, [], T0 + 3 * DAY + 1, 3 * DAY)
    receivers.enable(receiver.id, None, "acme", T0)
    Redelivery(database).replay(receiver, T0)
    receivers.remove(receiver.id, None)
    done = audit.find_entries(database, audit.AuditFilter(tenant="acme"))
    words = ["remove", "replay", "enable", "disable", "rotate", "change", "add"]
    assert [entry.act for entry in done] == [f"webhook.{word}" for word in words]
    assert {entry.data["webhook"] for entry in done} == {receiver.id} and done[3].reason == REASON_SILENT
    assert "two" not in str(done), "the audit log holds no secret"


def test_a_revived_job_sends_a_second_end_event(store, receivers, messages, spread) -> None:
    receiver = a_receiver(receivers)
    job = an_ended_job(store, State.DEAD)
    store.revive(job.id, T0)
    run = a_start(store, job.id)
    store_end(store, job.id, run.attempt, Reason.FINISHED, T0, result="{}")
    assert deliver(messages, spread, receiver) == [(job.id, "job.dlq"), (job.id, "job.completed")]


def test_a_queued_job_has_no_pending_message_for_a_receiver_of_ends(
    store: JobStore, database, receivers, spread
) -> None:
    receiver = a_receiver(receivers)
    a_queued_job(store)
    all_steps(spread)
    assert pending(database, receiver) == []


def test_polling_is_needed_only_while_a_receiver_is_behind(database, store, receivers, spread) -> None:
    one = a_receiver(receivers)
    an_ended_job(store)
    all_steps(spread)
    assert not spread.must_poll
    receivers.disable(one.id, None, None, None, T0)
    receivers.enable(one.id, None, "somebody", T0)
    for _ in range(FAILURES_TO_OPEN):
        receivers.note_failure(receivers.get(one.id), T0)
    spread.step(T0)
    assert spread.must_poll, "its breaker is open until a given time"
    receivers.note_success(receivers.get(one.id))
    all_steps(spread, T0 + DAY)
    spread.step(T0 + DAY)
    assert not spread.must_poll, "it has caught up with the shared cursor"


def test_while_the_event_reader_has_a_gap_the_fan_out_must_poll(receivers, store, spread) -> None:
    a_receiver(receivers)
    spread._reader.has_gap = True
    spread._reader.read = lambda _: []  # type: ignore[method-assign]
    spread.step(T0)
    assert spread.must_poll
