"""Webhooks: the subscriptions of tenants to events of their jobs, with breaker and pace.

After several different messages in a row have failed, a subscription's breaker opens: its messages wait, and after each
cooldown a single one is sent to test the URL, one that was never tried if there is any.  The longer the URL has been
failing, the longer the cooldown.  A message that alone is refused, however often, says nothing of the others.

A job's `callback_url` is a subscription for the ends of this job alone (`subscription_of_job`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple, TypeAlias

import orjson
import uuid_utils
from sqlalchemy import ColumnElement, Connection, Select, case, delete, func, insert, select, update

from slotkeeper import audit
from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import counters, storable_text
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.jobs.batches import ENDED_TYPE, Batch
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.notifications import SECRET_OVERLAP_MS
from slotkeeper.jobs.states import FINAL_STATES
from slotkeeper.jobs.tables import messages
from slotkeeper.jobs.values import Job
from slotkeeper.outbox.event_reader import EventReader
from slotkeeper.outbox.tables import receivers, tries

Row: TypeAlias = Any

ENABLED, DISABLED = "enabled", "disabled"
END_EVENT_TYPES = frozenset(EVENT_TYPES[state] for state in FINAL_STATES)
"""The event types of a subscription that names none."""
FAILURES_TO_OPEN = 5
"""Failures in a row that open a subscription's breaker."""
SHORTEST_COOLDOWN_MS, LONGEST_COOLDOWN_MS = 15_000, 300_000
"""Bounds of the time between two test messages while the breaker is open."""
_MAX_REASON_LENGTH = 500
REASON_GONE = "It answered 410: it is gone."
REASON_SILENT = "It has taken no message for too long."
CLAIM_AHEAD_MS = 1000
"""How long before its send time a message of a subscription with a pace may be claimed.

This is longer than the time between two polls, so that the pace is reached.
"""
CURSOR_COUNTER = "receivers.cursor"
"""The counter of the common cursor: the last event of which all subscriptions that follow it have their messages."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """A webhook, or a job's `callback_url`.

    types: the event types that it receives.
    sealed, former_sealed: the signing secrets, encrypted.
    template: JSON; None: the standard body.
    after_event: only later events become messages.
    behind: the last event that became messages; None: the subscription follows the common cursor.
    failures: different messages that failed in a row; failing_since_ms is None if the last message was delivered.
    open_until_ms: no message is sent before this time.
    max_per_s: messages a second; None: no limit.
    paced_until_us: by its pace, the next message is not sent before this time.
    """

    id: str
    tenant: str
    url: str
    types: frozenset[str]
    sealed: str
    created_ms: int
    template: str | None = None
    description: str = ""
    former_sealed: str | None = None
    former_until_ms: int | None = None
    state: str = ENABLED
    reason: str | None = None
    changed_by: str | None = None
    changed_ms: int | None = None
    after_event: int = 0
    behind: int | None = None
    failures: int = 0
    failing_since_ms: int | None = None
    open_until_ms: int = 0
    max_per_s: float | None = None
    paced_until_us: int = 0

    @property
    def enabled(self) -> bool:
        return self.state == ENABLED

    @property
    def breaker_is_open(self) -> bool:
        """True if only single test messages are sent, because too many in a row have failed."""
        return self.failures >= FAILURES_TO_OPEN

    def list_sealed_secrets(self, now_ms: int) -> list[str]:
        """Return the encrypted secrets to sign with, the current one first."""
        overlaps = self.former_sealed is not None and now_ms < (self.former_until_ms or 0)
        return [self.sealed, self.former_sealed] if overlaps and self.former_sealed else [self.sealed]


class RefusedMessage(NamedTuple):
    """A message that its receiver has refused, or that failed otherwise, and that is tried again."""

    job_id: str
    type: str
    tries: int
    last_status: int | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class SendTime:
    """The earliest time at which one message may be sent, in ms; `at_us` only if its subscription has a pace."""

    at_ms: int
    at_us: int | None = None


def claim_horizon_us(now_ms: int) -> int:
    """Return the latest send time, in µs, for which messages of subscriptions with a pace are claimed."""
    return (now_ms + CLAIM_AHEAD_MS) * 1000


def subscription_of_job(job: Job) -> "Subscription":
    """Return a job's `callback_url` as a subscription: for the ends of this job, signed with its tenant's secret."""
    return Subscription(job.id, job.tenant, job.callback_url or "", END_EVENT_TYPES, "", job.created_ms)


def subscription_of_batch(batch: Batch) -> "Subscription":
    """Return a batch's `callback_url` as a subscription: for its end, signed with its tenant's secret."""
    return Subscription(batch.id, batch.tenant, batch.callback_url or "", frozenset({ENDED_TYPE}), "", batch.created_ms)


def new_id() -> str:
    """Return the id of a new webhook."""
    return f"we_{uuid_utils.uuid7().hex}"


def cooldown_ms(failing_since_ms: int, now_ms: int) -> int:
    """Return the time until the next test message: a quarter of the time for which the URL has been failing."""
    return min(max((now_ms - failing_since_ms) // 4, SHORTEST_COOLDOWN_MS), LONGEST_COOLDOWN_MS)


class Subscriptions:
    """The webhooks in the database.

    A method with a `tenant` argument finds only this tenant's webhooks; None: those of all tenants.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    # -- reading ---------------------------------------------------------------------------------------------

    def list_of_tenant(self, tenant: str | None = None, after: str = "", limit: int = 1000) -> list[Subscription]:
        """Return webhooks, the oldest first, beginning after the id `after`."""
        query = select(receivers).where(receivers.c.id > after, *_of_tenant(tenant))
        query = query.order_by(receivers.c.id).limit(limit)
        with self.database.read() as connection:
            return [_from_row(row) for row in connection.execute(query)]

    def get(self, subscription_id: str, tenant: str | None = None) -> Subscription:
        """Return a webhook.  Raises NotFound."""
        with self.database.read() as connection:
            return _get(connection, subscription_id, tenant)

    def count_pending(self, subscription_ids: Iterable[str]) -> dict[str, int]:
        """Return the number of pending messages of each of these webhooks; those with none are left out."""
        query = (
            select(messages.c.receiver, func.count())
            .where(messages.c.receiver.in_(list(subscription_ids)), messages.c.state == "pending")
            .group_by(messages.c.receiver)
        )
        with self.database.read() as connection:
            return dict(tuple(row) for row in connection.execute(query))

    def find_refused(self, subscription_ids: Iterable[str]) -> "dict[str, RefusedMessage]":
        """Return the oldest message that each of these webhooks has refused and that is tried again, if any."""
        query = (
            select(*(messages.c[name] for name in ("receiver", *RefusedMessage._fields)))
            .where(messages.c.receiver.in_(list(subscription_ids)), messages.c.state == "pending", messages.c.tries > 0)
            .where(messages.c.last_error.is_not(None))
            .order_by(messages.c.owed_ms.desc(), messages.c.event.desc())
        )
        with self.database.read() as connection:
            return {row.receiver: RefusedMessage(*row[1:]) for row in connection.execute(query)}

    # -- changing --------------------------------------------------------------------------------------------

    def add(self, subscription: Subscription, most: int) -> Subscription:
        """Add a webhook, which receives the events from now on, and return it as stored.

        Raises Conflict if its tenant already has `most` webhooks.
        """
        # No transaction is open that could still commit an event with a lower number.
        after = EventReader(self.database).skip_to_end()
        values = _row_values(subscription) | {"after_event": after}
        entry = _make_entry("add", subscription.id, tenant=subscription.tenant)

        def unit(tx: Transaction) -> Subscription | Conflict:
            is_of_tenant = receivers.c.tenant == subscription.tenant
            tx.lock(f"webhooks of {subscription.tenant}")
            count = tx.connection.execute(select(func.count()).select_from(receivers).where(is_of_tenant)).scalar() or 0
            if count >= most:
                return Conflict(
                    f"{subscription.tenant!r} has {count} webhooks, which is all it may have; remove one first, or "
                    "have the operator raise SLOTKEEPER_WEBHOOK_MOST_RECEIVERS.",
                    most=most,
                )
            tx.connection.execute(insert(receivers), values)
            return _get(tx.connection, subscription.id, None)

        return audit.commit_audited(self.database, entry, unit)

    def change(self, subscription_id: str, tenant: str | None, **values: Any) -> Subscription:
        """Change `url`, `types`, `template`, `description` or `max_per_s`, and return the webhook.  Raises NotFound."""
        if "types" in values:
            values["types"] = _encode_types(values["types"])
        if "max_per_s" in values:
            values["paced_until_us"] = 0
        return self._change("change", subscription_id, tenant, values)

    def rotate_secret(self, subscription_id: str, tenant: str | None, sealed: str, now_ms: int) -> Subscription:
        """Replace the signing secret, and return the webhook.

        For SECRET_OVERLAP_MS, messages are also signed with the secret before this one.  An older one is dropped.
        """
        former = {"former_sealed": receivers.c.sealed, "former_until_ms": now_ms + SECRET_OVERLAP_MS}
        return self._change("rotate", subscription_id, tenant, {"sealed": sealed, **former})

    def reseal(self, subscription: Subscription, sealed: str, former_sealed: str | None) -> bool:
        """Store the same secrets, encrypted with another key.  Returns False if they have changed meanwhile."""
        same = (receivers.c.id == subscription.id) & (receivers.c.sealed == subscription.sealed)
        changed = update(receivers).where(same).values(sealed=sealed, former_sealed=former_sealed)
        return self.database.write(lambda tx: tx.connection.execute(changed).rowcount == 1)

    def enable(self, subscription_id: str, tenant: str | None, by: str, now_ms: int) -> Subscription:
        """Enable a webhook and close its breaker; it continues with the events since it was disabled."""
        values = _state_values(ENABLED, None, by, now_ms) | _HEALTHY
        return self._change("enable", subscription_id, tenant, values)

    def disable(
        self, subscription_id: str, tenant: str | None, by: str | None, reason: str | None, now_ms: int
    ) -> Subscription:
        """Disable a webhook: it receives no messages until it is enabled.

        by: the name of the API key that disables it; None: Slotkeeper itself does.
        """
        entry = _make_entry("disable", subscription_id, reason=reason)

        def unit(tx: Transaction) -> Subscription | NotFound:
            found = _disable(tx, subscription_id, tenant, by, reason, now_ms)
            if isinstance(found, Subscription):
                entry.write(tx, tenant=found.tenant)
            return found

        return self.database.write(unit)

    def disable_if_url(self, url: str, subscription_id: str, reason: str, now_ms: int) -> bool:
        """Disable a webhook on Slotkeeper's own account, if it still has this URL.

        Returns False, and changes nothing, if it has another URL or was removed.
        """
        entry = _make_entry("disable", subscription_id, reason=reason)

        def unit(tx: Transaction) -> bool:
            # This UPDATE locks the row until the transaction ends.
            same = update(receivers).where(receivers.c.id == subscription_id, receivers.c.url == url).values(url=url)
            if tx.connection.execute(same).rowcount == 0:
                return False
            found = _disable(tx, subscription_id, None, None, reason, now_ms)
            assert isinstance(found, Subscription), "it was here a moment ago"
            entry.write(tx, tenant=found.tenant)
            return True

        return self.database.write(unit)

    def remove(self, subscription_id: str, tenant: str | None) -> None:
        """Delete a webhook, its messages and its delivery log.  Raises NotFound."""
        entry = _make_entry("remove", subscription_id)

        def unit(tx: Transaction) -> None:
            entry.write(tx, tenant=_get(tx.connection, subscription_id, tenant).tenant)
            _delete(tx, receivers.c.id == subscription_id)

        self.database.write(unit)

    # -- breaker and pace ------------------------------------------------------------------------------------

    def note_success(self, subscription: Subscription) -> None:
        """Close the breaker after a delivery.  If the subscription was not failing, nothing is written."""
        if subscription.failures:
            healthy = update(receivers).where(receivers.c.id == subscription.id).values(_HEALTHY)
            self.database.write(lambda tx: tx.connection.execute(healthy), durable=False)

    def note_failure(
        self, subscription: Subscription, now_ms: int, retry_after_ms: int = 0, *, is_first_try: bool = True
    ) -> None:
        """Count a message that failed, and start a cooldown if the breaker is open.

        retry_after_ms: how long the receiver has asked for a pause.  is_first_try: False for a message that failed
        before, which is not counted again.
        """
        since = subscription.failing_since_ms if subscription.failing_since_ms is not None else now_ms
        counted = int(is_first_try)
        opens = subscription.failures + counted >= FAILURES_TO_OPEN
        until = now_ms + max(retry_after_ms, cooldown_ms(since, now_ms) if opens else 0)
        failed = (
            update(receivers)
            .where(receivers.c.id == subscription.id)
            .values(
                failures=receivers.c.failures + counted,
                failing_since_ms=func.coalesce(receivers.c.failing_since_ms, now_ms if is_first_try else None),
                # A concurrent attempt may have received a longer Retry-After.
                open_until_ms=case((receivers.c.open_until_ms < until, until), else_=receivers.c.open_until_ms),
            )
        )
        self.database.write(lambda tx: tx.connection.execute(failed), durable=False)

    def try_begin(self, tx: Transaction, subscription_id: str, now_ms: int, until: int) -> bool:
        """Return True if a message may be sent now.

        If the breaker is open, only one caller gets True: the others get False until `until` (ms), when the attempt of
        that caller is over.
        """
        may_send = (
            (receivers.c.id == subscription_id) & (receivers.c.state == ENABLED) & (receivers.c.open_until_ms <= now_ms)
        )
        failures = tx.connection.execute(select(receivers.c.failures).where(may_send)).scalar()
        if failures is None or failures < FAILURES_TO_OPEN:
            return failures is not None
        return tx.connection.execute(update(receivers).where(may_send).values(open_until_ms=until)).rowcount == 1

    def reserve_send_time(self, tx: Transaction, subscription_id: str, now_ms: int) -> "SendTime | None":
        """Reserve the next send time by the subscription's pace.  Returns None if that is too far ahead.

        The send times are reserved in the database, so the pace holds for any number of sending processes together.
        """
        is_this = receivers.c.id == subscription_id
        max_per_s = tx.connection.execute(select(receivers.c.max_per_s).where(is_this)).scalar()
        if max_per_s is None:
            return SendTime(now_ms)
        now_us, gap_us = now_ms * 1000, round(1e6 / max_per_s)
        send_us = case((receivers.c.paced_until_us < now_us, now_us), else_=receivers.c.paced_until_us)
        reserving = update(receivers).where(is_this, receivers.c.paced_until_us <= claim_horizon_us(now_ms))
        reserving = reserving.values(paced_until_us=send_us + gap_us)
        until_us = tx.connection.execute(reserving.returning(receivers.c.paced_until_us)).scalar()
        return None if until_us is None else SendTime(ceil((until_us - gap_us) / 1000), until_us - gap_us)

    def return_send_time(self, tx: Transaction, subscription_id: str, send_time: "SendTime") -> None:
        """Return a send time in the transaction that reserved it, because there is no message to send."""
        if send_time.at_us is not None:
            is_this = receivers.c.id == subscription_id
            tx.connection.execute(update(receivers).where(is_this).values(paced_until_us=send_time.at_us))

    def _change(self, action: str, subscription_id: str, tenant: str | None, values: Mapping[str, Any]) -> Subscription:
        is_this = [receivers.c.id == subscription_id, *_of_tenant(tenant)]
        entry = _make_entry(action, subscription_id)

        def unit(tx: Transaction) -> Subscription:
            tx.connection.execute(update(receivers).where(*is_this).values(values))
            found = _get(tx.connection, subscription_id, tenant)
            entry.write(tx, tenant=found.tenant)
            return found

        return self.database.write(unit)


def _disable(
    tx: Transaction, subscription_id: str, tenant: str | None, by: str | None, reason: str | None, now_ms: int
) -> Subscription | NotFound:
    """Disable a webhook in a transaction, and store the event after which it continues when it is enabled."""
    try:
        found = _get(tx.connection, subscription_id, tenant)
    except NotFound as unknown:
        return unknown
    behind = max(get_cursor(tx.connection), found.after_event) if found.behind is None else found.behind
    values = _state_values(DISABLED, reason, by, now_ms) | {"behind": behind}
    tx.connection.execute(update(receivers).where(receivers.c.id == subscription_id).values(values))
    return _get(tx.connection, subscription_id, None)


def delete_of_tenant(tx: Transaction, tenant: str) -> None:
    """Delete all webhooks of a tenant in a transaction, so that a later tenant of this name does not get them."""
    _delete(tx, receivers.c.tenant == tenant)


def _delete(tx: Transaction, condition: ColumnElement[bool]) -> None:
    """Delete webhooks, their messages and their delivery logs."""
    ids = tx.connection.execute(select(receivers.c.id).where(condition)).scalars().all()
    for column in (messages.c.receiver, tries.c.receiver, receivers.c.id):
        tx.connection.execute(delete(column.table).where(column.in_(ids)))


def select_subscriptions(connection: Connection, *conditions: ColumnElement[bool]) -> list[Subscription]:
    """Return the webhooks that fulfil all conditions, by id."""
    query = select(receivers).where(*conditions).order_by(receivers.c.id)
    return [_from_row(row) for row in connection.execute(query)]


def get_cursor(connection: Connection) -> int:
    """Return the common cursor (CURSOR_COUNTER)."""
    return connection.execute(_CURSOR).scalar() or 0


_CURSOR: Select[Any] = select(counters.c.value).where(counters.c.name == CURSOR_COUNTER)
_HEALTHY: dict[str, Any] = {"failures": 0, "failing_since_ms": None, "open_until_ms": 0}


def _make_entry(action: str, subscription_id: str, **facts: Any) -> audit.AuditEntry:
    return audit.make_entry(f"webhook.{action}", webhook=subscription_id, **facts)


def _state_values(state: str, reason: str | None, by: str | None, now_ms: int) -> dict[str, Any]:
    reason = None if reason is None else storable_text(reason, _MAX_REASON_LENGTH)
    return {"state": state, "reason": reason, "changed_by": by, "changed_ms": now_ms}


def _of_tenant(tenant: str | None) -> tuple[ColumnElement[bool], ...]:
    return () if tenant is None else (receivers.c.tenant == tenant,)


def _get(connection: Connection, subscription_id: str, tenant: str | None) -> Subscription:
    row = connection.execute(select(receivers).where(receivers.c.id == subscription_id, *_of_tenant(tenant))).first()
    if row is None:
        raise NotFound("There is no such webhook; GET /webhooks lists them.", webhook=subscription_id)
    return _from_row(row)


def _encode_types(types: Iterable[str]) -> str:
    return orjson.dumps(sorted(types)).decode()


def _row_values(subscription: Subscription) -> dict[str, Any]:
    values = {name: getattr(subscription, name) for name in Subscription.__dataclass_fields__}
    return values | {"types": _encode_types(subscription.types)}


def _from_row(row: Row) -> Subscription:
    return Subscription(**(row._asdict() | {"types": frozenset(orjson.loads(row.types))}))
