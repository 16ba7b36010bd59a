"""What subscriptions are still to be told, what they could not be told, and a log of the last tries.

A subscription is a tenant's webhook (slotkeeper/outbox/subscriptions.py), or a job's `callback_url`, which is one for
this job alone and has the job's id.  A message is an event for one subscription (HOOK-1).  Messages of one subscription
about one job are sent one after the other: a message may be claimed when none before it is pending.  What was delivered
is no longer here, only in the log, which is bounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    bindparam,
    cast,
    delete,
    exists,
    func,
    insert,
    select,
    tuple_,
    update,
)

from slotkeeper.db import Database, Transaction
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.db.schema import counters, storable_text
from slotkeeper.errors import Conflict
from slotkeeper.jobs import events as trail
from slotkeeper.jobs import notifications
from slotkeeper.jobs.statements import unindexed
from slotkeeper.jobs.tables import events, jobs, messages
from slotkeeper.outbox.subscriptions import (
    CURSOR_COUNTER,
    ENABLED,
    FAILURES_TO_OPEN,
    REASON_SILENT,
    Subscription,
    Subscriptions,
    claim_horizon_us,
)
from slotkeeper.outbox.tables import receivers, tries

Row: TypeAlias = Any

MOST_LOGGED = 1000
"""Tries of one receiver that the log keeps."""
LOGGED_MS = 7 * 24 * 3600 * 1000
"""How long it keeps them."""
MOST_LOGGED_OF_JOB = 20
"""Tries of one job's `callback_url` that the log keeps, as long as the job is kept."""
MOST_GIVEN_UP = 1000
"""Messages of one webhook that are remembered as given up."""
MOST_TESTS = 5
"""Tests of one receiver that may be under way."""
LONGEST_ANSWER = 256
"""Characters of an answer that the log keeps."""

TEST_TYPE = "webhook.test"
DELIVERED_TYPE = "webhook.delivered"
"""The event of a message that a job's `callback_url` has taken."""
_NO_JOB = ""
_MAX_ERROR = 500
_PAGE = 500
_OF_ONE = 64  # messages of one receiver that one look takes

_earlier = messages.alias("earlier")
_IS_FIRST = ~exists().where(
    _earlier.c.job_id == messages.c.job_id,
    _earlier.c.receiver == messages.c.receiver,
    _earlier.c.event < messages.c.event,
    unindexed(_earlier.c.state) == "pending",
)
_TIME_HAS_COME = messages.c.next_ms <= bindparam("p_now")
IS_DUE = (messages.c.state == "pending") & _TIME_HAS_COME
# Said so that the index of a receiver's pending messages is not used: one message is found by its key.
_IS_PENDING = unindexed(messages.c.state) == "pending"
_THIS = (messages.c.receiver == bindparam("p_receiver")) & (messages.c.event == bindparam("p_event"))
# The first of each tenant, then the second of each: one with very many keeps nobody's from their turn.
_TURN = func.row_number().over(partition_by=receivers.c.tenant, order_by=receivers.c.id)
_WHOLE_PER_S = cast(receivers.c.max_per_s, Integer).label("per_s")
_READY = CompiledStatement(
    select(receivers.c.id, receivers.c.tenant, receivers.c.failures, _WHOLE_PER_S)
    .where(
        receivers.c.state == ENABLED,
        receivers.c.open_until_ms <= bindparam("p_now"),
        receivers.c.paced_until_us <= bindparam("p_soon_us"),
        exists().where(messages.c.receiver == receivers.c.id, IS_DUE),
    )
    .order_by(_TURN, receivers.c.id)
    .limit(bindparam("p_limit", type_=messages.c.tries.type))
)
_ANY = CompiledStatement(select(messages.c.event).where(messages.c.state == "pending").limit(1))
_FIRST = CompiledStatement(
    select(messages.c.event)
    .where(messages.c.receiver == bindparam("p_receiver"), IS_DUE, _IS_FIRST)
    .order_by(messages.c.next_ms, messages.c.event)
    .limit(bindparam("p_limit", type_=messages.c.tries.type))
)
OF_JOB = messages.c.receiver == messages.c.job_id
"""A message for the `callback_url` of its job; said as in the indexes of these messages alone."""
IS_GIVEN_UP = messages.c.state == "given_up"
_CLAIM = CompiledStatement(
    update(messages)
    .where(_THIS, _IS_PENDING, _TIME_HAS_COME, _IS_FIRST)
    .values(tries=messages.c.tries + 1, next_ms=bindparam("p_until"))
    .returning(*messages.c)
)
_TRIED = _THIS & _IS_PENDING & (messages.c.tries == bindparam("p_tries"))
_DELIVERED = CompiledStatement(delete(messages).where(_TRIED))
_FAILED = CompiledStatement(
    update(messages)
    .where(_TRIED)
    .values(
        state=bindparam("p_state"),
        ended_ms=bindparam("p_ended"),
        last_status=bindparam("p_status"),
        last_error=bindparam("p_error"),
    )
)
# What comes after it in its job waits with it, so that nobody looks at it in vain.
_WAIT = CompiledStatement(
    update(messages)
    .where(
        messages.c.job_id == bindparam("p_job"),
        messages.c.receiver == bindparam("p_receiver"),
        _IS_PENDING,
    )
    .values(next_ms=bindparam("p_next"))
)


class MessageKey(NamedTuple):
    """Which message.  `of_job`: of a job's `callback_url`, whose id is then the receiver."""

    receiver: str
    event: int
    of_job: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One event for one subscription."""

    receiver: str
    event: int
    job_id: str
    type: str
    at_ms: int
    state: str
    tries: int
    next_ms: int
    owed_ms: int
    ended_ms: int | None
    last_status: int | None
    last_error: str | None
    send_ms: int = 0
    """Its receiver's pace lets it be sent at this time or later."""

    @property
    def id(self) -> str:
        """The same however often it is sent: its receiver tells repeated messages by it."""
        return (
            notifications.make_message_id(self.job_id, self.event)
            if self.of_job
            else message_id(self.event, self.at_ms)
        )

    @property
    def of_job(self) -> bool:
        """Whether it is for the `callback_url` of its job."""
        return self.receiver == self.job_id

    @property
    def key(self) -> MessageKey:
        return MessageKey(self.receiver, self.event, self.of_job)

    @property
    def is_test(self) -> bool:
        return self.event < 0


@dataclass(frozen=True, slots=True)
class ReadySubscription:
    """A receiver that may be sent something, and at most how many messages until the next look."""

    receiver: str
    tenant: str
    most: int


@dataclass(frozen=True, slots=True)
class DeliveryAttempt:
    """One try of a message, in the log.  `answer`: its first bytes; `inside`: it came from an operator's network."""

    id: int
    receiver: str
    message: str
    job_id: str
    type: str
    at_ms: int
    number: int
    outcome: str
    status: int | None
    latency_ms: int
    error: str | None
    answer: str | None
    inside: bool


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """What came of a try.  `cooldown_ms`: for how long the receiver asked to be left alone.  `permanent`: this address
    will never take the message."""

    ok: bool
    status: int | None
    latency_ms: int
    error: str = ""
    answer: str = ""
    inside: bool = False
    cooldown_ms: int = 0
    permanent: bool = False


def message_id(event: int, at_ms: int) -> str:
    return f"msg_test_{at_ms}_{-event}" if event < 0 else f"msg_{event}_{at_ms}"


class MessageQueue:
    """Reads and changes them."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.receivers = Subscriptions(database)

    # -- sending ---------------------------------------------------------------------------------------------

    def list_ready(self, now_ms: int, limit: int) -> list[ReadySubscription]:
        """Receivers that may be sent something, their tenants in turn."""
        params = {"p_now": now_ms, "p_soon_us": claim_horizon_us(now_ms), "p_limit": limit}
        with self.database.read() as connection:
            rows = _READY.fetch_all(connection, params)
        return [ReadySubscription(row.id, row.tenant, _most_at_once(row)) for row in rows]

    def has_pending(self) -> bool:
        """Whether a message is still to be sent, whatever keeps it from that now."""
        with self.database.read() as connection:
            return _ANY.fetch_first(connection, {}) is not None

    def list_due(self, receiver_id: str, now_ms: int, limit: int) -> list[int]:
        """The events that it may be told of now, at most one of each job."""
        with self.database.read() as connection:
            rows = _FIRST.fetch_all(connection, {"p_receiver": receiver_id, "p_now": now_ms, "p_limit": limit})
        return [row.event for row in rows]

    def claim(self, wanted: Sequence[MessageKey], now_ms: int, until: int) -> list[Message]:
        """Begin a try of each of these that may be made and that nobody else is at."""

        def unit(tx: Transaction) -> list[Message]:
            return [it for one in sorted(wanted) if (it := self._claim(tx, one, now_ms, until)) is not None]

        return self.database.write(unit, durable=False)

    def _claim(self, tx: Transaction, wanted: MessageKey, now_ms: int, until: int) -> Message | None:
        receiver_id, event, of_job = wanted
        params = {"p_receiver": receiver_id, "p_event": event, "p_now": now_ms, "p_until": until}
        if of_job:
            row = _CLAIM.fetch_first(tx.connection, params)
            return None if row is None else _message(row)
        turn = self.receivers.reserve_send_time(tx, receiver_id, now_ms)
        if turn is None:
            return None
        row = (
            _CLAIM.fetch_first(tx.connection, params)
            if self.receivers.try_begin(tx, receiver_id, now_ms, until)
            else None
        )
        if row is None:  # Somebody else was quicker, or tries whether it is back.
            self.receivers.return_send_time(tx, receiver_id, turn)
            return None
        return replace(_message(row), send_ms=turn.at_ms)

    def note_delivered(self, message: Message, receiver: Subscription, answered: DeliveryResult, now_ms: int) -> None:
        """Its receiver has taken it."""

        def unit(tx: Transaction) -> None:
            if _DELIVERED.execute(tx.connection, _of(message)):
                _log(tx, message, "delivered", answered, now_ms)
                if message.of_job:
                    told = {"tries": message.tries, "status": answered.status}
                    trail.add_event(tx, message.job_id, DELIVERED_TYPE, now_ms, told)

        self.database.write(unit, durable=False)
        self.receivers.note_success(receiver)

    def note_failed(
        self, message: Message, receiver: Subscription, answered: DeliveryResult, now_ms: int, next_ms: int | None
    ) -> None:
        """Its receiver has not taken it; `next_ms` None: it is given up."""
        gives_up = next_ms is None
        params = _of(message) | {
            "p_state": "given_up" if gives_up else "pending",
            "p_ended": now_ms if gives_up else None,
            "p_status": answered.status,
            "p_error": storable_text(answered.error, _MAX_ERROR),
        }

        def unit(tx: Transaction) -> None:
            if not _FAILED.execute(tx.connection, params):
                return
            if next_ms is not None:
                later = {"p_job": message.job_id, "p_receiver": message.receiver, "p_next": next_ms}
                _WAIT.execute(tx.connection, later)
            elif message.is_test:
                tx.connection.execute(delete(messages).where(_is(message.receiver, message.event)))
            _log(tx, message, "given_up" if gives_up else "failed", answered, now_ms)

        self.database.write(unit, durable=False)
        if not message.of_job:
            self.receivers.note_failure(receiver, now_ms, answered.cooldown_ms)

    def drop(self, message: Message) -> None:
        """What it tells of is no longer in the record: it is owed no more."""
        gone = delete(messages).where(_is(message.receiver, message.event))
        self.database.write(lambda tx: tx.connection.execute(gone), durable=False)

    # -- reading ---------------------------------------------------------------------------------------------

    def list_given_up_webhooks(
        self,
        tenant: str | None = None,
        receiver_id: str | None = None,
        before: tuple[str, int] | None = None,
        limit: int = 50,
    ) -> list[Message]:
        """Messages of webhooks that were given up, by webhook and, of each, the newest first; `before`: a cursor, the
        last one of the page before."""
        query = select(messages).where(IS_GIVEN_UP, ~OF_JOB)
        if receiver_id is not None:
            query = query.where(messages.c.receiver == receiver_id)
        if tenant is not None:
            mine = select(receivers.c.id).where(receivers.c.tenant == tenant)
            query = query.where(messages.c.receiver.in_(mine))
        if before is not None:
            receiver, event = before
            same = (messages.c.receiver == receiver) & (messages.c.event < event)
            query = query.where(same | (messages.c.receiver < receiver))
        query = query.order_by(messages.c.receiver.desc(), messages.c.event.desc()).limit(limit)
        with self.database.read() as connection:
            return [_message(row) for row in connection.execute(query)]

    def list_attempts(self, receiver_id: str, before: int | None = None, limit: int = 50) -> list[DeliveryAttempt]:
        """The log of a receiver, the newest first; `before`: the last one of the page before."""
        query = select(tries).where(tries.c.receiver == receiver_id)
        if before is not None:
            query = query.where(tries.c.id < before)
        with self.database.read() as connection:
            rows = connection.execute(query.order_by(tries.c.id.desc()).limit(limit))
            return [DeliveryAttempt(**(row._asdict() | {"inside": bool(row.inside)})) for row in rows]

    # -- what persons ask for --------------------------------------------------------------------------------

    def send_test(self, receiver: Subscription, now_ms: int) -> str:
        """Owe a receiver a test, which is sent at once, and once; answers the message's id.  Raises Conflict."""

        def unit(tx: Transaction) -> str | Conflict:
            which = (messages.c.receiver == receiver.id) & (messages.c.event < 0)
            found = select(func.count(), func.min(messages.c.event)).where(which)
            count, lowest = tx.connection.execute(found).one()
            if count >= MOST_TESTS:
                return Conflict(f"{count} tests of this webhook have not been sent yet; wait for them.")
            event = (lowest or 0) - 1
            row = _row(receiver.id, event, f"{_NO_JOB}{event}", TEST_TYPE, now_ms, now_ms) | {"next_ms": 0}
            tx.connection.execute(insert(messages), row)
            tried = update(receivers).where(receivers.c.id == receiver.id).values(open_until_ms=0)
            tx.connection.execute(tried)
            return message_id(event, now_ms)

        return self.database.write(unit)

    def enqueue(
        self, tx: Transaction, receiver_id: str, found: Sequence[tuple[int, str, str, int]], now_ms: int
    ) -> int:
        """In a transaction: have these events (number, job, type, time) told.  What is pending stays as it is, what
        was given up is tried again.  Answers how many are new."""
        there = messages.c.receiver == receiver_id, messages.c.event.in_([event for event, *_ in found])
        known = set(tx.connection.execute(select(messages.c.event).where(*there)).scalars())
        if known:
            tx.connection.execute(update(messages).where(*there, IS_GIVEN_UP).values(_again(now_ms)))
        rows = [_row(receiver_id, *event, now_ms) for event in found if event[0] not in known]
        if rows:
            tx.connection.execute(insert(messages), rows)
        return len(rows)

    def retry_all(self, receiver_id: str, now_ms: int) -> int:
        """Owe all that was given up of a webhook once more; answers how many."""
        return self.retry(messages.c.receiver == receiver_id, now_ms)

    def retry(self, which: ColumnElement[bool], now_ms: int) -> int:
        """Owe these messages once more, if they were given up; answers how many."""
        # One that is given up anew meanwhile is not met again.
        old = IS_GIVEN_UP & (messages.c.ended_ms <= now_ms)
        some = select(messages.c.receiver, messages.c.event).where(which, old).limit(_PAGE)
        key = tuple_(messages.c.receiver, messages.c.event)
        again = update(messages).where(key.in_(some), IS_GIVEN_UP).values(_again(now_ms))
        retried = 0
        while found := self.database.write(lambda tx: tx.connection.execute(again).rowcount):
            retried += found
        return retried

    # -- bounds ----------------------------------------------------------------------------------------------

    def trim(self, receiver_ids: Sequence[str], now_ms: int, keep_ms: int) -> None:
        """Keep the log and the list of what was given up within their bounds; disable receivers that take nothing."""
        for receiver_id in receiver_ids:
            self.database.write(lambda tx, it=receiver_id: _trim(tx, it, now_ms), durable=False)  # type: ignore[misc]
        for receiver in self._silent(now_ms - keep_ms):
            self.receivers.disable(receiver, None, None, REASON_SILENT, now_ms)
        while self.database.write(lambda tx: _give_up_disabled(tx, now_ms, keep_ms)) == _PAGE:
            pass

    def _silent(self, before: int) -> list[str]:
        silent = (receivers.c.state == ENABLED) & (receivers.c.failing_since_ms <= before)
        opened = silent & (receivers.c.failures >= FAILURES_TO_OPEN)
        with self.database.read() as connection:
            return list(connection.execute(select(receivers.c.id).where(opened)).scalars())


def count_pending(connection: Connection, receiver_id: str, most: int) -> int:
    """How many messages wait for a receiver, counted up to `most`."""
    some = select(messages.c.event).where(messages.c.receiver == receiver_id, messages.c.state == "pending")
    return connection.execute(select(func.count()).select_from(some.limit(most).subquery())).scalar() or 0


def _trim(tx: Transaction, receiver_id: str, now_ms: int) -> None:
    mine = tries.c.receiver == receiver_id
    last = select(tries.c.id).where(mine).order_by(tries.c.id.desc()).offset(MOST_LOGGED).limit(1).scalar_subquery()
    tx.connection.execute(delete(tries).where(mine, (tries.c.id <= last) | (tries.c.at_ms < now_ms - LOGGED_MS)))
    given_up = (messages.c.receiver == receiver_id) & (messages.c.state == "given_up")
    newest = select(messages.c.event).where(given_up).order_by(messages.c.event.desc())
    bound = newest.offset(MOST_GIVEN_UP).limit(1).scalar_subquery()
    tx.connection.execute(delete(messages).where(given_up, messages.c.event <= bound))


def _give_up_disabled(tx: Transaction, now_ms: int, keep_ms: int) -> int:
    """Give up some of what disabled receivers have been owed for too long: it holds jobs in the record."""
    disabled = select(receivers.c.id).where(receivers.c.state != ENABLED)
    old = (messages.c.state == "pending") & (messages.c.owed_ms < now_ms - keep_ms)
    some = select(messages.c.receiver, messages.c.event).where(messages.c.receiver.in_(disabled), old).limit(_PAGE)
    rows = tx.connection.execute(some).all()
    for row in rows:
        ended = {"state": "given_up", "ended_ms": now_ms, "last_error": "Its webhook is disabled."}
        tx.connection.execute(update(messages).where(_is(row.receiver, row.event), old).values(ended))
    return len(rows)


def _again(now_ms: int) -> dict[str, Any]:
    return {"state": "pending", "tries": 0, "next_ms": now_ms, "owed_ms": now_ms, "ended_ms": None}


def _row(receiver_id: str, event: int, job_id: str, type_: str, at_ms: int, now_ms: int) -> dict[str, Any]:
    names = ("receiver", "event", "job_id", "type", "at_ms", "next_ms", "owed_ms")
    return dict(zip(names, (receiver_id, event, job_id, type_, at_ms, now_ms, now_ms), strict=True))


def _is(receiver_id: str, event: int) -> ColumnElement[bool]:
    return (messages.c.receiver == receiver_id) & (messages.c.event == event)


def _of(message: Message) -> dict[str, Any]:
    return {"p_receiver": message.receiver, "p_event": message.event, "p_tries": message.tries}


def _log(tx: Transaction, message: Message, outcome: str, answered: DeliveryResult, now_ms: int) -> None:
    row = {
        "receiver": message.receiver,
        "message": message.id,
        "job_id": "" if message.is_test else message.job_id,
        "type": message.type,
        "at_ms": now_ms,
        "number": message.tries,
        "outcome": outcome,
        "status": answered.status,
        "latency_ms": answered.latency_ms,
        "error": storable_text(answered.error, _MAX_ERROR) or None,
        "answer": storable_text(answered.answer, LONGEST_ANSWER) or None,
        "inside": int(answered.inside),
    }
    tx.connection.execute(insert(tries), row)
    if message.of_job:
        old = (tries.c.receiver == message.receiver) & (tries.c.number <= message.tries - MOST_LOGGED_OF_JOB)
        tx.connection.execute(delete(tries).where(old))


def _most_at_once(row: Row) -> int:
    if row.failures >= FAILURES_TO_OPEN:
        return 1  # to try whether it is back
    return _OF_ONE if row.per_s is None else min(max(row.per_s, 1), _OF_ONE)


def _message(row: Row) -> Message:
    return Message(**row._asdict())


# -- jobs that are removed -----------------------------------------------------------------------------------------


def find_objection(tx: Transaction, job_id: str) -> Conflict | None:
    """Why a job cannot be removed yet: a subscription is still to be told something of it."""
    own = select(messages).where(
        messages.c.receiver == job_id, messages.c.job_id == job_id, messages.c.state == "pending"
    )
    if (pending := tx.connection.execute(own.limit(1)).first()) is not None:
        webhook_id = _message(pending).id
        return Conflict(
            f"Job {job_id!r} still owes its webhook {webhook_id!r}, which would be lost with it; "
            "remove the job when that is delivered or given up.",
            job_id=job_id,
            webhook_id=webhook_id,
        )
    receiver = _pending_with(tx, job_id) or _to_come_to(tx, job_id)
    if receiver is None:
        return None
    return Conflict(
        f"The webhook {receiver!r} has not been told all of job {job_id!r}, and could not be without it; "
        "remove the job later, or disable the webhook first.",
        job_id=job_id,
        webhook=receiver,
    )


def _pending_with(tx: Transaction, job_id: str) -> str | None:
    theirs = (messages.c.job_id == job_id) & (messages.c.state == "pending") & (receivers.c.state == ENABLED)
    found = select(messages.c.receiver).join(receivers, receivers.c.id == messages.c.receiver).where(theirs)
    return tx.connection.execute(found.limit(1)).scalar()


def _to_come_to(tx: Transaction, job_id: str) -> str | None:
    """A receiver that wants an event of a job of which no message has been made."""
    cursor = tx.connection.execute(select(counters.c.value).where(counters.c.name == CURSOR_COUNTER)).scalar() or 0
    tenant = select(jobs.c.tenant).where(jobs.c.id == job_id).scalar_subquery()
    theirs = select(receivers.c.id, receivers.c.types, receivers.c.after_event, receivers.c.behind)
    wanting = tx.connection.execute(theirs.where(receivers.c.tenant == tenant, receivers.c.state == ENABLED)).all()
    happened = tx.connection.execute(select(events.c.id, events.c.type).where(events.c.job_id == job_id)).all()
    for row in wanting:
        told = max(cursor, row.after_event) if row.behind is None else row.behind
        if any(event.id > told and f'"{event.type}"' in row.types for event in happened):
            return str(row.id)
    return None


def forget_jobs(tx: Transaction, job_ids: Sequence[str]) -> None:
    """What these jobs were to tell goes with them, and the log of their `callback_url`."""
    tx.connection.execute(delete(messages).where(messages.c.job_id.in_(job_ids)))
    tx.connection.execute(delete(tries).where(tries.c.receiver.in_(job_ids)))


# A question asked of each job, not a set to be left out: for that PostgreSQL would read all messages.
HAS_PENDING_MESSAGE = (
    select(messages.c.event)
    .where(messages.c.job_id == jobs.c.id, unindexed(messages.c.state) == "pending")
    .limit(1)
    .scalar_subquery()
    .is_not(None)
)
"""A job stays in the record until its messages have been sent or given up (HOOK-1)."""
