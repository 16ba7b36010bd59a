"""Operators' requests: messages that were given up, retry, replay, test, the delivery log."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, case, func, insert, select, tuple_, update

from slotkeeper import audit
from slotkeeper.db import Database, Transaction
from slotkeeper.errors import Conflict
from slotkeeper.jobs import notifications
from slotkeeper.jobs.batches import ENDED_TYPE
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.statements import unindexed
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import batches, events, jobs, messages
from slotkeeper.outbox.event_reader import get_last_id
from slotkeeper.outbox.subscriptions import Subscription, get_cursor
from slotkeeper.outbox.tables import receivers, tries
from slotkeeper.outbox.webhook_messages import (
    IS_GIVEN_UP,
    OF_JOB,
    TEST_TYPE,
    Message,
    enqueue,
    make_pending_values,
    make_row,
    message_from_row,
    message_id,
    tenant_of_message,
    url_of_message,
)

MOST_TESTS = 5
"""Pending tests of one webhook."""
_PAGE = 500  # messages that one transaction makes pending again
_CALLBACK_KEY = (messages.c.at_ms, messages.c.receiver, messages.c.event)


@dataclass(frozen=True, slots=True)
class GivenUpCallback:
    """A message to the `callback_url` of a job or a batch that was given up.  model: None: of a batch."""

    message: Message
    model: str | None
    tenant: str
    url: str

    @property
    def status(self) -> str:
        """The final state of the job that the message reports; of a batch: ended."""
        return "ended" if self.model is None else notifications.state_of_end(self.message.event).value


@dataclass(frozen=True, slots=True)
class DeliveryAttempt:
    """An attempt to deliver a message, from the delivery log.

    receiver: the id of the subscription.  message: the webhook-id.  number: 1 for the message's first attempt.
    answer: the beginning of the response.  inside: the response came from the operator's network.
    """

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


class Redelivery:
    """Reads the results of deliveries, and makes messages pending again.

    A method with a `tenant` argument finds only messages of this tenant; None: those of all tenants.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    # -- reading ---------------------------------------------------------------------------------------------

    def list_given_up_webhooks(
        self,
        tenant: str | None = None,
        subscription_id: str | None = None,
        before: tuple[str, int] | None = None,
        limit: int = 50,
    ) -> list[Message]:
        """Return messages of webhooks that were given up, by webhook, the newest first.

        before: the cursor of the page: webhook and event of the last message of the page before.
        """
        query = select(messages).where(IS_GIVEN_UP, ~OF_JOB)
        if subscription_id is not None:
            query = query.where(messages.c.receiver == subscription_id)
        if tenant is not None:
            of_tenant = select(receivers.c.id).where(receivers.c.tenant == tenant)
            query = query.where(messages.c.receiver.in_(of_tenant))
        if before is not None:
            last_id, event = before
            same = (messages.c.receiver == last_id) & (messages.c.event < event)
            query = query.where(same | (messages.c.receiver < last_id))
        query = query.order_by(messages.c.receiver.desc(), messages.c.event.desc()).limit(limit)
        with self.database.read() as connection:
            return [message_from_row(row) for row in connection.execute(query)]

    def list_given_up_callbacks(
        self, tenant: str | None = None, before: tuple[int, str, int] | None = None, limit: int = 50
    ) -> list[GivenUpCallback]:
        """Return messages to jobs' `callback_url` that were given up, those of the newest ends first.

        before: the cursor of the page: time (ms), job and event of the last message of the page before.
        """
        model = select(jobs.c.model).where(jobs.c.id == messages.c.job_id).scalar_subquery()
        query = select(messages, model, tenant_of_message, url_of_message).where(IS_GIVEN_UP, OF_JOB)
        if tenant is not None:
            query = query.where(tenant_of_message == tenant)
        if before is not None:
            query = query.where(tuple_(*_CALLBACK_KEY) < before)
        query = query.order_by(*(column.desc() for column in _CALLBACK_KEY)).limit(limit)
        with self.database.read() as connection:
            return [GivenUpCallback(Message(*row[:-3]), *row[-3:]) for row in connection.execute(query)]

    def list_attempts(self, subscription_id: str, before: int | None = None, limit: int = 50) -> list[DeliveryAttempt]:
        """Return a subscription's delivery log, the newest attempt first.

        subscription_id: of a webhook, or the id of a job with a `callback_url`.
        before: the cursor of the page: the id of the last attempt of the page before.
        """
        query = select(tries).where(tries.c.receiver == subscription_id)
        if before is not None:
            query = query.where(tries.c.id < before)
        with self.database.read() as connection:
            rows = connection.execute(query.order_by(tries.c.id.desc()).limit(limit))
            return [DeliveryAttempt(**(row._asdict() | {"inside": bool(row.inside)})) for row in rows]

    # -- webhooks --------------------------------------------------------------------------------------------

    def send_test(self, subscription: Subscription, now_ms: int) -> str:
        """Add a test message, which is sent at once and without retries, and return its webhook-id.

        Raises Conflict if MOST_TESTS tests are pending.
        """
        entry = audit.make_entry("webhook.test", tenant=subscription.tenant, webhook=subscription.id)

        def unit(tx: Transaction) -> str | Conflict:
            is_test = (messages.c.receiver == subscription.id) & (messages.c.event < 0)
            found = select(func.count(), func.min(messages.c.event)).where(is_test)
            count, lowest = tx.connection.execute(found).one()
            if count >= MOST_TESTS:
                return Conflict(f"{count} tests of this webhook have not been sent yet; wait for them.")
            event = (lowest or 0) - 1
            # The job ids of tests differ, so that no test waits for another one.
            row = make_row(subscription.id, event, str(event), TEST_TYPE, now_ms, now_ms) | {"next_ms": 0}
            tx.connection.execute(insert(messages), row)
            # The test does not wait for the breaker's cooldown.
            tx.connection.execute(update(receivers).where(receivers.c.id == subscription.id).values(open_until_ms=0))
            return message_id(event, now_ms)

        return audit.commit_audited(self.database, entry, unit)

    def retry_webhook(self, subscription: Subscription, now_ms: int) -> int:
        """Make all messages of a webhook that were given up pending again, and return their number."""
        entry = audit.make_entry("webhook.replay", tenant=subscription.tenant, webhook=subscription.id)
        audit.write_entry(self.database, entry)
        return self._retry(messages.c.receiver == subscription.id, now_ms)

    def replay(self, subscription: Subscription, since_ms: int) -> int:
        """Send all events since a time to a webhook again; return the number of the event before the first of them.

        The webhook's own cursor is moved back, and slotkeeper/outbox/fan_out.py writes the messages.
        """
        with self.database.read() as connection:
            after = _find_event_before(connection, since_ms)
        entry = audit.make_entry(
            "webhook.replay", tenant=subscription.tenant, webhook=subscription.id, since_ms=since_ms
        )

        def unit(tx: Transaction) -> int:
            common = max(get_cursor(tx.connection), subscription.after_event)
            position = func.coalesce(receivers.c.behind, common)
            earlier = case((position < after, position), else_=after)
            tx.connection.execute(update(receivers).where(receivers.c.id == subscription.id).values(behind=earlier))
            entry.write(tx)
            return after

        return self.database.write(unit)

    def replay_one(self, subscription: Subscription, event: int, now_ms: int) -> bool:
        """Send one event to a webhook again.  Returns False if its tenant has no such event."""
        query = (
            select(events.c.id, events.c.job_id, events.c.type, events.c.at_ms)
            .outerjoin(jobs, jobs.c.id == events.c.job_id)
            .where(
                events.c.id == event,
                events.c.type.in_([*EVENT_TYPES.values(), ENDED_TYPE]),
                func.coalesce(events.c.tenant, jobs.c.tenant) == subscription.tenant,
            )
        )
        entry = audit.make_entry("webhook.replay", tenant=subscription.tenant, webhook=subscription.id, event=event)

        def unit(tx: Transaction) -> bool:
            row = tx.connection.execute(query).first()
            if row is None:
                return False
            enqueue(tx, subscription.id, [tuple(row)], now_ms)
            return True

        return audit.commit_audited(self.database, entry, unit)

    # -- callbacks of jobs -----------------------------------------------------------------------------------

    def retry_callbacks(self, tenant: str | None, since_ms: int, now_ms: int) -> int:
        """Make messages to `callback_url`s that were given up pending again, and return their number.

        since_ms: only of jobs that have ended since this time.
        """
        audit.write_entry(self.database, audit.make_entry("callback.replay", tenant=tenant, since_ms=since_ms))
        which = OF_JOB & (messages.c.at_ms >= since_ms)
        return self._retry(which if tenant is None else which & (tenant_of_message == tenant), now_ms)

    def retry_callback(self, webhook_id: str, tenant: str | None, now_ms: int) -> bool:
        """Make one message to a `callback_url` pending, also if it was delivered.

        A message that is pending stays as it is.  Returns False if there is no such message.
        """
        if (named := notifications.parse_message_id(webhook_id)) is None:
            return False
        job_id, attempt, state = named
        query = (
            select(events.c.at_ms, jobs.c.tenant, jobs.c.model)
            .join(jobs, jobs.c.id == events.c.job_id)
            .where(events.c.job_id == job_id, events.c.type == EVENT_TYPES[state], events.c.attempt == attempt)
            .where(jobs.c.callback_url.is_not(None), *_of_tenant(tenant))
        )
        entry = audit.make_entry("callback.replay", webhook=webhook_id)

        of_batch = select(batches.c.ended_ms, batches.c.tenant).where(
            batches.c.id == job_id, batches.c.callback_url.is_not(None), batches.c.ended_ms.is_not(None)
        )
        if tenant is not None:
            of_batch = of_batch.where(batches.c.tenant == tenant)

        def unit(tx: Transaction) -> bool:
            number, type_ = notifications.make_end_number(attempt, state), EVENT_TYPES[state]
            found: Any = tx.connection.execute(query).first()
            about = dict[str, str]()
            if found is not None:
                about = {"model": found.model}
            elif (found := tx.connection.execute(of_batch).first()) is not None:
                number, type_ = notifications.make_end_number(0, State.COMPLETED), ENDED_TYPE
            else:
                return False
            enqueue(tx, job_id, [(number, job_id, type_, found[0])], now_ms)
            entry.write(tx, tenant=found.tenant, **about)
            return True

        return self.database.write(unit)

    def _retry(self, which: ColumnElement[bool], now_ms: int) -> int:
        """Make messages that were given up pending again, some in each transaction, and return their number."""
        # The time leaves out a message that is given up again while this goes on: it would be retried forever.
        old = IS_GIVEN_UP & (messages.c.ended_ms <= now_ms)
        some = select(messages.c.receiver, messages.c.event).where(which, old).limit(_PAGE)
        key = tuple_(messages.c.receiver, messages.c.event)
        pending = update(messages).where(key.in_(some), IS_GIVEN_UP).values(make_pending_values(now_ms))
        retried = 0
        while count := self.database.write(lambda tx: tx.connection.execute(pending).rowcount):
            retried += count
        return retried


def _find_event_before(connection: Connection, since_ms: int) -> int:
    """Return the number before the first event at or after a time, by binary search.

    Numbers ascend with time only to within a second, so the search begins a second earlier.
    """
    low, high = 0, get_last_id(connection)
    next_event = select(events.c.id, events.c.at_ms).order_by(events.c.id).limit(1)
    while low < high:
        middle = (low + high) // 2
        row = connection.execute(next_event.where(events.c.id > middle)).first()
        if row is None or row.at_ms >= since_ms - 1000:
            high = middle
        else:
            low = row.id
    return low


def _of_tenant(tenant: str | None) -> tuple[ColumnElement[bool], ...]:
    # unindexed: fewer messages were given up than the tenant has jobs, so its index of jobs would be slower.
    return () if tenant is None else (unindexed(jobs.c.tenant) == tenant,)
