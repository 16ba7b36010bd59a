"""Turn events into messages of webhooks, once each, by one cursor.

    events   1 2 3 4 5 6 7 8 9
                   ^       ^
                   |       common cursor: webhooks that follow it have the messages of all events up to here
                   a webhook that is behind has its own position (receivers.behind)

The transaction that writes the messages also moves the cursor.  So a job's transition writes nothing for webhooks, no
event is skipped or repeated whichever process dies in between, and any number of processes may run this.

A webhook falls behind if its breaker is open or it has too many pending messages.  It gets no messages then, and its
position is stored.  It catches up from there, page by page, when it can.  A replay moves the position back.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Integer, bindparam, case, func, insert, or_, select, update

from slotkeeper.db import Database, Transaction
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.db.schema import counters
from slotkeeper.jobs.tables import events, jobs
from slotkeeper.outbox.event_reader import EventReader, OutboxEvent
from slotkeeper.outbox.subscriptions import (
    CURSOR_COUNTER,
    ENABLED,
    FAILURES_TO_OPEN,
    Subscription,
    get_cursor,
    select_subscriptions,
)
from slotkeeper.outbox.tables import receivers
from slotkeeper.outbox.webhook_messages import count_untried, enqueue

MOST_PENDING = 2000
"""Messages of one webhook that were never tried; with more, it falls behind."""
_PAGE = 500  # events that one transaction turns into messages
_MAX_WEBHOOKS = 20  # that one transaction writes messages for, and that catch up in one step
_SCAN_NUMBERS = 20_000  # event numbers that one catch-up query covers
_CATCH_UP_S = 0.05  # for all catch-ups of a step (at least one runs), so that a long replay does not delay new events

_FOLLOWS = (receivers.c.state == ENABLED) & receivers.c.behind.is_(None)
# These statements run four times a second while anything is written, and mostly return nothing.
_FIRST_AFTER_EVENT = CompiledStatement(select(func.min(receivers.c.after_event)).where(_FOLLOWS))
_BEHIND = CompiledStatement(
    select(receivers.c.id)
    .where(
        receivers.c.state == ENABLED,
        receivers.c.behind.is_not(None),
        or_(receivers.c.failures < FAILURES_TO_OPEN, receivers.c.open_until_ms <= bindparam("p_now")),
    )
    .order_by(receivers.c.id)
)
_ANY_BEHIND = CompiledStatement(
    select(receivers.c.id).where(receivers.c.state == ENABLED, receivers.c.behind.is_not(None)).limit(1)
)
_IS_CURSOR = counters.c.name == CURSOR_COUNTER
_MISSED = (
    select(events.c.id, events.c.job_id, events.c.type, events.c.at_ms)
    .outerjoin(jobs, jobs.c.id == events.c.job_id)
    .where(
        events.c.id > bindparam("p_after"),
        events.c.id <= bindparam("p_last"),
        events.c.type.in_(bindparam("p_types", expanding=True)),
        func.coalesce(events.c.tenant, jobs.c.tenant) == bindparam("p_tenant"),
    )
    .order_by(events.c.id)
    .limit(bindparam("p_limit", type_=Integer))
)


class EventFanOut:
    """Writes messages for new events, and for webhooks that are behind.  Not thread-safe.

    has_more: more new events may be stored than the last step has read.
    must_poll: the next step may find work although nothing was committed since, because a time was reached.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reader = EventReader(database, transitions_only=False)  # with the ends of batches
        self._last_id = ""  # the webhook that was the last to catch up
        self.has_more = False
        self.must_poll = True

    def step(self, now_ms: int) -> int:
        """Process one page of new events and some catch-ups, and return the number of new messages.

        Raises DatabaseUnavailable.
        """
        self.must_poll = True
        made = self._process_new(now_ms)
        until = time.monotonic() + _CATCH_UP_S
        behind = self._list_behind(now_ms)
        self.must_poll = bool(behind) or self._reader.has_gap or self._is_any_behind()
        for subscription in behind:
            self._last_id = subscription.id
            made += self._catch_up(subscription, now_ms)
            if time.monotonic() >= until:
                break
        return made

    # -- webhooks that follow the common cursor ----------------------------------------------------------------------

    def _process_new(self, now_ms: int) -> int:
        before, self.has_more = self._begin(), False
        if before is None:
            return 0
        if self._reader.position != before:
            self._reader.position = before
        found = self._reader.read(_PAGE)
        after = self._reader.position
        if after == before:
            return 0
        self.has_more = after - before >= _PAGE

        def unit(tx: Transaction) -> int | None:
            return self._write_messages(tx, found, before, now_ms) if _move_cursor(tx, before, after) else None

        made = self._database.write(unit)
        if made is None:  # Another process has moved the cursor first.
            self._reader.position = 0
        return made or 0

    def _begin(self) -> int | None:
        """Return the cursor, after moving it past events that no webhook receives; None: no webhook follows it."""
        with self._database.read() as connection:
            first = _FIRST_AFTER_EVENT.fetch_value(connection, {})
            if first is None:
                return None
            cursor = get_cursor(connection)
            if first <= cursor:
                return cursor
        return self._database.write(lambda tx: _skip_unwanted(tx, cursor))

    def _write_messages(self, tx: Transaction, found: Sequence[OutboxEvent], cursor: int, now_ms: int) -> int:
        """Write the messages of these events, and return their number.

        cursor: the position before these events, at which a webhook falls behind.
        """
        made = 0
        of_tenants = receivers.c.tenant.in_({entry.tenant for entry in found})
        # Read after the events, so a webhook that was added before one of them is included.
        following = select_subscriptions(tx.connection, _FOLLOWS, of_tenants)
        wanted = {
            subscription.id: [_message_fields(entry) for entry in found if _wants(subscription, entry)]
            for subscription in following
        }
        late: list[str] = []
        for n, subscription in enumerate(_round_robin(one for one in following if wanted[one.id])):
            # The transaction blocks other writers, so it serves a few webhooks.  The others fall behind, and each
            # catches up in a transaction that serves it alone.
            if n < _MAX_WEBHOOKS and _has_capacity(tx.connection, subscription):
                made += enqueue(tx, subscription.id, wanted[subscription.id], now_ms)
            else:
                late.append(subscription.id)
        behind = case((receivers.c.after_event > cursor, receivers.c.after_event), else_=cursor)
        if late:
            # If a replay has begun meanwhile, the webhook has a lower position, which stays.
            is_late = receivers.c.id.in_(late) & receivers.c.behind.is_(None)
            tx.connection.execute(update(receivers).where(is_late).values(behind=behind))
        return made

    # -- webhooks that are behind ------------------------------------------------------------------------------------

    def _list_behind(self, now_ms: int) -> list[Subscription]:
        """Return some webhooks that are behind and may be sent to, round robin."""
        with self._database.read() as connection:
            ids = [row.id for row in _BEHIND.fetch_all(connection, {"p_now": now_ms})]
            if not ids:
                return []
            rotated = [id_ for id_ in ids if id_ > self._last_id] + [id_ for id_ in ids if id_ <= self._last_id]
            chosen = rotated[:_MAX_WEBHOOKS]
            found = {one.id: one for one in select_subscriptions(connection, receivers.c.id.in_(chosen))}
        return [found[id_] for id_ in chosen if id_ in found]

    def _is_any_behind(self) -> bool:
        """Return True if any webhook is behind, also one whose breaker is open."""
        with self._database.read() as connection:
            return _ANY_BEHIND.fetch_first(connection, {}) is not None

    def _catch_up(self, subscription: Subscription, now_ms: int) -> int:
        """Write a page of messages that a webhook has missed, and return their number.

        If its breaker is open, one message is written, which tests its URL; none if too many wait for their first try.
        """
        assert subscription.behind is not None
        behind = subscription.behind
        with self._database.read() as connection:
            capacity = 1 if subscription.breaker_is_open else MOST_PENDING // 2
            if count_untried(connection, subscription.id, capacity) >= capacity:
                return 0
            cursor = get_cursor(connection)
            last = min(behind + _SCAN_NUMBERS, cursor)
            limit = 1 if subscription.breaker_is_open else _PAGE
            params = {"p_types": sorted(subscription.types), "p_tenant": subscription.tenant, "p_limit": limit}
            found = connection.execute(_MISSED, {"p_after": behind, "p_last": last, **params}).all()
        position = found[-1].id if len(found) == limit else max(last, behind)
        rows = [(row.id, row.job_id, row.type, row.at_ms) for row in found]

        def unit(tx: Transaction) -> int:
            joins = position >= cursor and _lock_cursor(tx, cursor)
            unchanged = (
                (receivers.c.id == subscription.id) & (receivers.c.behind == behind) & (receivers.c.state == ENABLED)
            )
            moved = update(receivers).where(unchanged).values(behind=None if joins else position)
            if tx.connection.execute(moved).rowcount == 0:
                return 0
            return enqueue(tx, subscription.id, rows, now_ms) if rows else 0

        return self._database.write(unit)


def count_unwritten(database: Database, subscriptions: Sequence[Subscription], most: int = 1000) -> dict[str, int]:
    """Return how many events each webhook that is behind still gets messages of, counted up to `most`."""
    found = dict[str, int]()
    with database.read() as connection:
        cursor = get_cursor(connection)
        for one in subscriptions:
            if one.behind is not None:
                last = min(one.behind + _SCAN_NUMBERS, cursor)
                params = {"p_types": sorted(one.types), "p_tenant": one.tenant, "p_limit": most}
                rows = connection.execute(_MISSED, {"p_after": one.behind, "p_last": last, **params}).all()
                found[one.id] = len(rows)
    return found


def _move_cursor(tx: Transaction, before: int, after: int) -> bool:
    """Move the common cursor.  Returns False if it is not at `before`."""
    moved = update(counters).where(_IS_CURSOR, counters.c.value == before).values(value=after)
    if tx.connection.execute(moved).rowcount == 1:
        return True
    if before or tx.connection.execute(select(counters.c.value).where(_IS_CURSOR)).first() is not None:
        return False
    tx.connection.execute(insert(counters), {"name": CURSOR_COUNTER, "value": after})
    return True


def _skip_unwanted(tx: Transaction, cursor: int) -> int | None:
    """Move the cursor past events that no webhook receives, and return it.  Returns None if it is not at `cursor`."""
    if not _move_cursor(tx, cursor, cursor):
        return None
    # Read while this transaction locks the cursor: a webhook that was behind may just have joined at it.
    after = max(_FIRST_AFTER_EVENT.fetch_value(tx.connection, {}) or cursor, cursor)
    return after if _move_cursor(tx, cursor, after) else None


def _lock_cursor(tx: Transaction, at: int) -> bool:
    """Return True if the cursor is at `at`; no other transaction moves it then before this one ends."""
    same: Any = update(counters).where(_IS_CURSOR, counters.c.value == at).values(value=at)
    return tx.connection.execute(same).rowcount == 1


def _round_robin(subscriptions: Iterable[Subscription]) -> list[Subscription]:
    """Return the first webhook of each tenant, then the second of each, so that no tenant delays the others."""
    count: Counter[str] = Counter()
    ranked: list[tuple[int, int, Subscription]] = []
    for place, subscription in enumerate(subscriptions):
        ranked.append((count[subscription.tenant], place, subscription))
        count[subscription.tenant] += 1
    return [subscription for _, _, subscription in sorted(ranked, key=lambda rank: rank[:2])]


def _has_capacity(connection: Connection, subscription: Subscription) -> bool:
    return not subscription.breaker_is_open and count_untried(connection, subscription.id, MOST_PENDING) < MOST_PENDING


def _wants(subscription: Subscription, entry: OutboxEvent) -> bool:
    event = entry.event
    is_of_tenant = entry.tenant == subscription.tenant
    return is_of_tenant and event.id > subscription.after_event and event.type in subscription.types


def _message_fields(entry: OutboxEvent) -> tuple[int, str, str, int]:
    event = entry.event
    return event.id, event.job_id, event.type, event.at_ms
