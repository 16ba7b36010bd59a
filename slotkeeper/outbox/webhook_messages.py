"""Messages that are due: claim one, and note how its delivery went.

A message is one event for one subscription (HOOK-1).  The subscription is a tenant's webhook
(slotkeeper/outbox/subscriptions.py), or the `callback_url` of a job or a batch, whose id is that of the subscription.
Messages of one subscription about one job are sent in order: a message can be claimed if none before it is pending.  A
delivered message is deleted, and only the delivery log shows it; a message that was given up is kept for the operators
(slotkeeper/outbox/redelivery.py).
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
from slotkeeper.db.schema import storable_text
from slotkeeper.jobs import notifications
from slotkeeper.jobs.events import add_event
from slotkeeper.jobs.statements import unindexed
from slotkeeper.jobs.tables import batches, jobs, messages
from slotkeeper.outbox.subscriptions import (
    ENABLED,
    FAILURES_TO_OPEN,
    Subscription,
    Subscriptions,
    claim_horizon_us,
)
from slotkeeper.outbox.tables import receivers, tries

Row: TypeAlias = Any

MOST_LOGGED_OF_JOB = 20
"""Attempts of one job's `callback_url` in the delivery log, which keeps them as long as the job is stored."""
LONGEST_ANSWER = 256
"""Characters of a response in the delivery log."""

TEST_TYPE = "webhook.test"
DELIVERED_TYPE = "webhook.delivered"
"""The type of the event that a message was delivered to a job's `callback_url`."""
_MAX_ERROR_LENGTH = 500
_MAX_PER_POLL = 64  # messages of one webhook

_earlier = messages.alias("earlier")
_IS_FIRST = ~exists().where(
    _earlier.c.job_id == messages.c.job_id,
    _earlier.c.receiver == messages.c.receiver,
    _earlier.c.event < messages.c.event,
    unindexed(_earlier.c.state) == "pending",
)
_TIME_REACHED = messages.c.next_ms <= bindparam("p_now")
_IS_DUE = (messages.c.state == "pending") & _TIME_REACHED
# unindexed: one message is found by its primary key, not by the index of a subscription's pending messages.
_IS_PENDING = unindexed(messages.c.state) == "pending"
_IS_MESSAGE = (messages.c.receiver == bindparam("p_receiver")) & (messages.c.event == bindparam("p_event"))
# The first webhook of each tenant, then the second of each, so that a tenant with many does not delay the others.
_ROUND_ROBIN = func.row_number().over(partition_by=receivers.c.tenant, order_by=receivers.c.id)
_WHOLE_PER_S = cast(receivers.c.max_per_s, Integer).label("per_s")
_READY = CompiledStatement(
    select(receivers.c.id, receivers.c.tenant, receivers.c.failures, _WHOLE_PER_S)
    .where(
        receivers.c.state == ENABLED,
        receivers.c.open_until_ms <= bindparam("p_now"),
        receivers.c.paced_until_us <= bindparam("p_horizon_us"),
        exists().where(messages.c.receiver == receivers.c.id, _IS_DUE),
    )
    .order_by(_ROUND_ROBIN, receivers.c.id)
    .limit(bindparam("p_limit", type_=messages.c.tries.type))
)
_ANY_PENDING = CompiledStatement(select(messages.c.event).where(messages.c.state == "pending").limit(1))
_DUE = select(messages.c.event).where(messages.c.receiver == bindparam("p_receiver"), _IS_DUE, _IS_FIRST)
_OLDEST_FIRST = (messages.c.next_ms, messages.c.event)
_DUE_LIMIT = bindparam("p_limit", type_=messages.c.tries.type)
_DUE_OF_WEBHOOK = CompiledStatement(_DUE.order_by(*_OLDEST_FIRST).limit(_DUE_LIMIT))
_UNTRIED_OF_WEBHOOK = CompiledStatement(_DUE.order_by(messages.c.tries > 0, *_OLDEST_FIRST).limit(_DUE_LIMIT))
OF_JOB = messages.c.receiver == messages.c.job_id
"""A message for the `callback_url` of its job; the same expression as in the partial indexes of these messages."""
IS_GIVEN_UP = messages.c.state == "given_up"
# Scalar subqueries, because SQLite would begin a join with all jobs.  A message is of a job, or else of a batch.
_OF_BATCH = (batches.c.id == messages.c.job_id) & batches.c.callback_url.is_not(None)
url_of_message = func.coalesce(
    select(jobs.c.callback_url).where(jobs.c.id == messages.c.job_id).scalar_subquery(),
    select(batches.c.callback_url).where(_OF_BATCH).limit(1).scalar_subquery(),
)
tenant_of_message = func.coalesce(
    select(jobs.c.tenant).where(jobs.c.id == messages.c.job_id).scalar_subquery(),
    select(batches.c.tenant).where(_OF_BATCH).limit(1).scalar_subquery(),
)
_CALLBACK_KEY = (messages.c.next_ms, messages.c.receiver, messages.c.event)
_DUE_CALLBACKS = (
    select(*_CALLBACK_KEY, url_of_message, tenant_of_message)
    .where(_IS_DUE, OF_JOB)
    .limit(bindparam("p_limit", type_=Integer))
)
_OLDEST_CALLBACKS = _DUE_CALLBACKS.order_by(*_CALLBACK_KEY)
_FIRST_CALLBACKS = CompiledStatement(_OLDEST_CALLBACKS)  # executed four times a second while messages are pending
_NEWEST_CALLBACKS = _DUE_CALLBACKS.order_by(*(column.desc() for column in _CALLBACK_KEY))
_CLAIM = CompiledStatement(
    update(messages)
    .where(_IS_MESSAGE, _IS_PENDING, _TIME_REACHED, _IS_FIRST)
    .values(tries=messages.c.tries + 1, next_ms=bindparam("p_until"))
    .returning(*messages.c)
)
# The number of attempts identifies the claim: after another process has claimed the message, nothing matches.
_IS_CLAIMED = _IS_MESSAGE & _IS_PENDING & (messages.c.tries == bindparam("p_tries"))
_DELIVERED = CompiledStatement(delete(messages).where(_IS_CLAIMED))
_FAILED = CompiledStatement(
    update(messages)
    .where(_IS_CLAIMED)
    .values(
        state=bindparam("p_state"),
        ended_ms=bindparam("p_ended"),
        last_status=bindparam("p_status"),
        last_error=bindparam("p_error"),
    )
)
# Later messages of the job cannot be sent before this one, so they get its time and are not found as due.
_DEFER_JOB = CompiledStatement(
    update(messages)
    .where(
        messages.c.job_id == bindparam("p_job"),
        messages.c.receiver == bindparam("p_receiver"),
        _IS_PENDING,
    )
    .values(next_ms=bindparam("p_next"))
)


class MessageKey(NamedTuple):
    """The key of a message.

    receiver: the id of its subscription.  of_job: the subscription is a job's `callback_url`.
    """

    receiver: str
    event: int
    of_job: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One event for one subscription.

    receiver: the id of the subscription.
    event: the event's number; negative for a test.
    owed_ms: since when the message has been pending.
    send_ms: by the subscription's pace, the message is not sent before this time.
    """

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

    @property
    def id(self) -> str:
        """The webhook-id: the same at every attempt, so that the client recognizes repeated messages."""
        if self.of_job:
            return notifications.make_message_id(self.job_id, self.event)
        return message_id(self.event, self.at_ms)

    @property
    def of_job(self) -> bool:
        """True if the message is for the `callback_url` of its job."""
        return self.receiver == self.job_id

    @property
    def key(self) -> MessageKey:
        return MessageKey(self.receiver, self.event, self.of_job)

    @property
    def is_test(self) -> bool:
        return self.event < 0


@dataclass(frozen=True, slots=True)
class ReadySubscription:
    """A webhook with due messages.  most: how many of them may be sent until the next poll.

    is_trial: its breaker is open, and one message tests it.
    """

    receiver: str
    tenant: str
    most: int
    is_trial: bool = False


@dataclass(frozen=True, slots=True)
class DueCallback:
    """A due message for a job's `callback_url`.  The first three fields are the cursor of the next page."""

    next_ms: int
    job_id: str
    event: int
    url: str
    tenant: str


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """The result of an attempt to deliver a message.

    status: HTTP; None: there was no response.  answer: the beginning of the response.
    inside: the response came from the operator's network.
    cooldown_ms: the pause that the receiver has asked for.
    permanent: the URL will never accept the message.
    """

    ok: bool
    status: int | None
    latency_ms: int
    error: str = ""
    answer: str = ""
    inside: bool = False
    cooldown_ms: int = 0
    permanent: bool = False


def message_id(event: int, at_ms: int) -> str:
    """Return the webhook-id of a webhook's message."""
    return f"msg_test_{at_ms}_{-event}" if event < 0 else f"msg_{event}_{at_ms}"


class MessageQueue:
    """The pending messages in the database, for the process that sends them."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.subscriptions = Subscriptions(database)

    def list_ready(self, now_ms: int, limit: int) -> list[ReadySubscription]:
        """Return webhooks with due messages whose breaker and pace allow sending, round robin by tenant."""
        params = {"p_now": now_ms, "p_horizon_us": claim_horizon_us(now_ms), "p_limit": limit}
        with self.database.read() as connection:
            rows = _READY.fetch_all(connection, params)
        return [
            ReadySubscription(row.id, row.tenant, _most_per_poll(row), row.failures >= FAILURES_TO_OPEN) for row in rows
        ]

    def has_pending(self) -> bool:
        """Return True if any message is pending, due or not."""
        with self.database.read() as connection:
            return _ANY_PENDING.fetch_first(connection, {}) is not None

    def list_due(self, subscription_id: str, now_ms: int, limit: int, *, is_trial: bool = False) -> list[int]:
        """Return the event numbers of a webhook's due messages, at most one of each job, the oldest first.

        is_trial: those that were never tried come first: one that is refused would not show that the URL takes others.
        """
        query = _UNTRIED_OF_WEBHOOK if is_trial else _DUE_OF_WEBHOOK
        with self.database.read() as connection:
            rows = query.fetch_all(connection, {"p_receiver": subscription_id, "p_now": now_ms, "p_limit": limit})
        return [row.event for row in rows]

    def list_due_callbacks(self, now_ms: int, limit: int, after: DueCallback | None = None) -> list[DueCallback]:
        """Return due messages for jobs' `callback_url`, the oldest first; `after`: the last one of the page before."""
        params = {"p_now": now_ms, "p_limit": limit}
        with self.database.read() as connection:
            if after is None:
                return [DueCallback(*row) for row in _FIRST_CALLBACKS.fetch_all(connection, params)]
            query = _OLDEST_CALLBACKS.where(tuple_(*_CALLBACK_KEY) > (after.next_ms, after.job_id, after.event))
            return [DueCallback(*row) for row in connection.execute(query, params)]

    def list_newest_due_callbacks(self, now_ms: int, limit: int) -> list[DueCallback]:
        """Return due messages for jobs' `callback_url`, the newest first."""
        params = {"p_now": now_ms, "p_limit": limit}
        with self.database.read() as connection:
            return [DueCallback(*row) for row in connection.execute(_NEWEST_CALLBACKS, params)]

    def claim(self, keys: Sequence[MessageKey], now_ms: int, until: int) -> list[Message]:
        """Claim messages for one attempt each, until `until` (ms), and return those that were claimed.

        Left out are messages that another process has claimed, or that are not due.
        """

        def unit(tx: Transaction) -> list[Message]:
            claimed = (self._claim(tx, key, now_ms, until) for key in sorted(keys))
            return [message for message in claimed if message is not None]

        return self.database.write(unit, durable=False)

    def _claim(self, tx: Transaction, key: MessageKey, now_ms: int, until: int) -> Message | None:
        subscription_id, event, of_job = key
        params = {"p_receiver": subscription_id, "p_event": event, "p_now": now_ms, "p_until": until}
        if of_job:
            row = _CLAIM.fetch_first(tx.connection, params)
            return None if row is None else message_from_row(row)
        send_time = self.subscriptions.reserve_send_time(tx, subscription_id, now_ms)
        if send_time is None:
            return None
        may_send = self.subscriptions.try_begin(tx, subscription_id, now_ms, until)
        row = _CLAIM.fetch_first(tx.connection, params) if may_send else None
        if row is None:  # Another process has claimed the message, or sends the test message of an open breaker.
            self.subscriptions.return_send_time(tx, subscription_id, send_time)
            return None
        return replace(message_from_row(row), send_ms=send_time.at_ms)

    def note_delivered(self, message: Message, subscription: Subscription, result: DeliveryResult, now_ms: int) -> None:
        """Delete a delivered message, log the attempt, and close the subscription's breaker."""

        def unit(tx: Transaction) -> None:
            if _DELIVERED.execute(tx.connection, _claim_params(message)):
                _log_attempt(tx, message, "delivered", result, now_ms)
                if message.of_job:
                    data = {"tries": message.tries, "status": result.status}
                    add_event(tx, message.job_id, DELIVERED_TYPE, now_ms, data)

        self.database.write(unit, durable=False)
        self.subscriptions.note_success(subscription)

    def note_failed(
        self, message: Message, subscription: Subscription, result: DeliveryResult, now_ms: int, next_ms: int | None
    ) -> None:
        """Log a failed attempt, and schedule the next one at `next_ms`; None: give the message up."""
        gives_up = next_ms is None
        params = _claim_params(message) | {
            "p_state": "given_up" if gives_up else "pending",
            "p_ended": now_ms if gives_up else None,
            "p_status": result.status,
            "p_error": storable_text(result.error, _MAX_ERROR_LENGTH),
        }

        def unit(tx: Transaction) -> None:
            if not _FAILED.execute(tx.connection, params):
                return
            if next_ms is not None:
                deferred = {"p_job": message.job_id, "p_receiver": message.receiver, "p_next": next_ms}
                _DEFER_JOB.execute(tx.connection, deferred)
            elif message.is_test:
                tx.connection.execute(delete(messages).where(_is_message(message)))
            _log_attempt(tx, message, "given_up" if gives_up else "failed", result, now_ms)

        self.database.write(unit, durable=False)
        if not message.of_job:
            self.subscriptions.note_failure(subscription, now_ms, result.cooldown_ms, is_first_try=message.tries == 1)

    def drop(self, message: Message) -> None:
        """Delete a message whose event, job or webhook is no longer stored."""
        dropped = delete(messages).where(_is_message(message))
        self.database.write(lambda tx: tx.connection.execute(dropped), durable=False)


def enqueue(tx: Transaction, subscription_id: str, events: Sequence[tuple[int, str, str, int]], now_ms: int) -> int:
    """Add messages for these events (number, job, type, time) in a transaction, and return how many are new.

    A message that is pending stays as it is; a message that was given up becomes pending again.
    """
    stored = messages.c.receiver == subscription_id, messages.c.event.in_([event for event, *_ in events])
    known = set(tx.connection.execute(select(messages.c.event).where(*stored)).scalars())
    if known:
        tx.connection.execute(update(messages).where(*stored, IS_GIVEN_UP).values(make_pending_values(now_ms)))
    rows = [make_row(subscription_id, *event, now_ms) for event in events if event[0] not in known]
    if rows:
        tx.connection.execute(insert(messages), rows)
    return len(rows)


def count_untried(connection: Connection, subscription_id: str, most: int) -> int:
    """Return the number of a subscription's pending messages that were never tried, counted up to `most`.

    One that was refused holds up no other, so it does not count.
    """
    is_untried = (messages.c.state == "pending") & (messages.c.tries == 0)
    some = select(messages.c.event).where(messages.c.receiver == subscription_id, is_untried)
    return connection.execute(select(func.count()).select_from(some.limit(most).subquery())).scalar() or 0


def make_row(subscription_id: str, event: int, job_id: str, type_: str, at_ms: int, now_ms: int) -> dict[str, Any]:
    """Return the row of a new message."""
    return {
        "receiver": subscription_id,
        "event": event,
        "job_id": job_id,
        "type": type_,
        "at_ms": at_ms,
        "next_ms": now_ms,
        "owed_ms": now_ms,
    }


def make_pending_values(now_ms: int) -> dict[str, Any]:
    """Return the values that make a message pending again."""
    return {"state": "pending", "tries": 0, "next_ms": now_ms, "owed_ms": now_ms, "ended_ms": None}


def message_from_row(row: Row) -> Message:
    """Return the message of a row with all columns."""
    return Message(**row._asdict())


def _is_message(message: Message) -> ColumnElement[bool]:
    return (messages.c.receiver == message.receiver) & (messages.c.event == message.event)


def _claim_params(message: Message) -> dict[str, Any]:
    return {"p_receiver": message.receiver, "p_event": message.event, "p_tries": message.tries}


def _log_attempt(tx: Transaction, message: Message, outcome: str, result: DeliveryResult, now_ms: int) -> None:
    """Add an attempt to the delivery log."""
    row = {
        "receiver": message.receiver,
        "message": message.id,
        "job_id": "" if message.is_test else message.job_id,
        "type": message.type,
        "at_ms": now_ms,
        "number": message.tries,
        "outcome": outcome,
        "status": result.status,
        "latency_ms": result.latency_ms,
        "error": storable_text(result.error, _MAX_ERROR_LENGTH) or None,
        "answer": storable_text(result.answer, LONGEST_ANSWER) or None,
        "inside": int(result.inside),
    }
    tx.connection.execute(insert(tries), row)
    if message.of_job:
        old = (tries.c.receiver == message.receiver) & (tries.c.number <= message.tries - MOST_LOGGED_OF_JOB)
        tx.connection.execute(delete(tries).where(old))


def _most_per_poll(row: Row) -> int:
    if row.failures >= FAILURES_TO_OPEN:
        return 1  # the test message of an open breaker
    return _MAX_PER_POLL if row.per_s is None else min(max(row.per_s, 1), _MAX_PER_POLL)
