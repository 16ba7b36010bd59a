"""From events to messages: each event that a receiver wants becomes a message, once, and none is passed over.

Receivers go through the events together, by one cursor of the record, which is moved in the transaction that writes
their messages.  So a transition writes nothing for them, whatever dies in between nothing is left out, and any number
of processes may do this.  A receiver that takes nothing, or has very much before it, falls behind: it gets no messages
then, only the number of the event up to which it was told, and reads on from there when it can.  So is a replay.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Integer, bindparam, case, func, insert, or_, select, update

from slotkeeper import audit
from slotkeeper.db import Database, Transaction
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.db.schema import counters
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.tables import events, jobs
from slotkeeper.outbox.event_reader import EventReader, OutboxEvent
from slotkeeper.outbox.subscriptions import (
    CURSOR_COUNTER,
    ENABLED,
    FAILURES_TO_OPEN,
    Subscription,
    get_cursor,
    get_last_id,
    select_subscriptions,
)
from slotkeeper.outbox.tables import receivers
from slotkeeper.outbox.webhook_messages import MessageQueue, count_pending

MOST_PENDING = 2000
"""Messages of one receiver that stand beside each other; with more to come it falls behind."""
_PAGE = 500  # events that one transaction makes messages of
_AT_ONCE = 20  # receivers that one transaction writes messages for, and that catch up in one step
_SCANNED = 20_000  # numbers of events that one look of a receiver which is behind goes over
_CATCHING_UP_S = 0.05  # of one step, but one receiver at least; a replay of years is nobody else's delay

_FOLLOWS = (receivers.c.state == ENABLED) & receivers.c.behind.is_(None)
# These are asked four times a second where anybody writes, and mostly in vain.
_LEAST = CompiledStatement(select(func.min(receivers.c.after_event)).where(_FOLLOWS))
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
    """Makes messages of what is new, and of what receivers have missed.  For one thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._messages = MessageQueue(database)
        self._tail = EventReader(database)
        self._last = ""  # of the receivers that are behind, the last that was looked at
        self.has_more = False
        """There may be more that is new, whatever came of the last step."""
        self.must_poll = True
        """Time alone may let the next step do more than the last."""

    def step(self, now_ms: int) -> int:
        """Go on by one page; answers how many messages came of it.  Raises RecordUnavailable."""
        self.must_poll = True
        made = self._follow(now_ms)
        until = time.monotonic() + _CATCHING_UP_S
        behind = self._behind(now_ms)
        self.must_poll = bool(behind) or self._tail.has_gap or self._is_any_behind()
        for receiver in behind:
            self._last = receiver.id
            made += self._catch_up(receiver, now_ms)
            if time.monotonic() >= until:
                break
        return made

    def _follow(self, now_ms: int) -> int:
        """For the receivers that go together."""
        here, self.has_more = self._begun(), False
        if here is None:
            return 0
        if self._tail.position != here:
            self._tail.position = here
        entries = self._tail.read(_PAGE)
        there = self._tail.position
        if there == here:
            return 0
        self.has_more = there - here >= _PAGE

        def unit(tx: Transaction) -> int | None:
            return self._spread(tx, entries, here, there, now_ms) if _moves(tx, here, there) else None

        made = self._database.write(unit)
        if made is None:  # Another process was quicker.
            self._tail.position = 0
        return made or 0

    def _begun(self) -> int | None:
        """Where the cursor stands; None: nobody wants anything.  What was before all who want it is left out."""
        with self._database.read() as connection:
            first = _LEAST.fetch_value(connection, {})
            if first is None:
                return None
            here = get_cursor(connection)
            if first <= here:
                return here
        return self._database.write(lambda tx: _skip(tx, here))

    def _spread(self, tx: Transaction, entries: Sequence[OutboxEvent], here: int, there: int, now_ms: int) -> int:
        made = 0
        theirs = receivers.c.tenant.in_({entry.tenant for entry in entries})
        # Looked for after the events: whoever was added before them is here.
        found = select_subscriptions(tx.connection, _FOLLOWS, theirs)
        wanted = {it.id: [_of(entry) for entry in entries if _wants(it, entry)] for it in found}
        late: list[str] = []
        for n, receiver in enumerate(_in_turn(it for it in found if wanted[it.id])):
            # Nobody else writes meanwhile: of very many the others catch up, each in a transaction of its own.
            if n < _AT_ONCE and _has_room(tx.connection, receiver):
                made += self._messages.enqueue(tx, receiver.id, wanted[receiver.id], now_ms)
            else:
                late.append(receiver.id)
        behind = case((receivers.c.after_event > here, receivers.c.after_event), else_=here)
        if late:
            which = receivers.c.id.in_(late) & receivers.c.behind.is_(None)  # Else a replay has begun meanwhile.
            tx.connection.execute(update(receivers).where(which).values(behind=behind))
        return made

    # -- those that are behind ---------------------------------------------------------------------------------------

    def _behind(self, now_ms: int) -> list[Subscription]:
        """Some of them, in turn."""
        with self._database.read() as connection:
            found = [row.id for row in _BEHIND.fetch_all(connection, {"p_now": now_ms})]
            if not found:
                return []
            in_turn = [it for it in found if it > self._last] + [it for it in found if it <= self._last]
            chosen = in_turn[:_AT_ONCE]
            read = {it.id: it for it in select_subscriptions(connection, receivers.c.id.in_(chosen))}
        return [read[it] for it in chosen if it in read]

    def _is_any_behind(self) -> bool:
        """Whether there is one that is behind, though it be left alone for now."""
        with self._database.read() as connection:
            return _ANY_BEHIND.fetch_first(connection, {}) is not None

    def _catch_up(self, receiver: Subscription, now_ms: int) -> int:
        """Make a page of messages of what a receiver has missed, if there is room; one, where it is a trial."""
        assert receiver.behind is not None
        behind = receiver.behind
        with self._database.read() as connection:
            room = 1 if receiver.breaker_is_open else MOST_PENDING // 2
            if count_pending(connection, receiver.id, room) >= room:
                return 0
            last = get_cursor(connection)
            until = min(behind + _SCANNED, last)
            limit = 1 if receiver.breaker_is_open else _PAGE
            params = {"p_types": sorted(receiver.types), "p_tenant": receiver.tenant, "p_limit": limit}
            found = connection.execute(_MISSED, {"p_after": behind, "p_last": until, **params}).all()
        told = found[-1].id if len(found) == limit else max(until, behind)
        rows = [(row.id, row.job_id, row.type, row.at_ms) for row in found]

        def unit(tx: Transaction) -> int:
            joins = told >= last and _stands(tx, last)
            which = (receivers.c.id == receiver.id) & (receivers.c.behind == behind) & (receivers.c.state == ENABLED)
            moved = update(receivers).where(which).values(behind=None if joins else told)
            if tx.connection.execute(moved).rowcount == 0:
                return 0
            return self._messages.enqueue(tx, receiver.id, rows, now_ms) if rows else 0

        return self._database.write(unit)


def replay(database: Database, receiver: Subscription, since_ms: int) -> int:
    """Have a receiver told once more of all that it wants since a time; answers the event behind which that begins."""
    with database.read() as connection:
        after = _before(connection, since_ms)
    replaying = audit.make_entry("webhook.replay", tenant=receiver.tenant, webhook=receiver.id, since_ms=since_ms)

    def unit(tx: Transaction) -> int:
        here = func.coalesce(receivers.c.behind, max(get_cursor(tx.connection), receiver.after_event))
        earlier = case((here < after, here), else_=after)
        tx.connection.execute(update(receivers).where(receivers.c.id == receiver.id).values(behind=earlier))
        replaying.write(tx)
        return after

    return database.write(unit)


def replay_one(database: Database, receiver: Subscription, event: int, now_ms: int) -> bool:
    """Have a receiver told of one event once more.  False: there is no such event of its tenant."""
    query = (
        select(events.c.id, events.c.job_id, events.c.type, events.c.at_ms)
        .outerjoin(jobs, jobs.c.id == events.c.job_id)
        .where(
            events.c.id == event,
            events.c.type.in_(EVENT_TYPES.values()),
            func.coalesce(events.c.tenant, jobs.c.tenant) == receiver.tenant,
        )
    )
    messages = MessageQueue(database)

    def unit(tx: Transaction) -> bool:
        row = tx.connection.execute(query).first()
        if row is None:
            return False
        messages.enqueue(tx, receiver.id, [tuple(row)], now_ms)
        return True

    return database.write(unit)


def _before(connection: Connection, since_ms: int) -> int:
    """The number before the first event of that time or later.  Numbers grow with time, give or take a second."""
    low, high = 0, get_last_id(connection)
    first = select(events.c.id, events.c.at_ms).order_by(events.c.id).limit(1)
    while low < high:
        middle = (low + high) // 2
        row = connection.execute(first.where(events.c.id > middle)).first()
        if row is None or row.at_ms >= since_ms - 1000:
            high = middle
        else:
            low = row.id
    return low


def _moves(tx: Transaction, here: int, there: int) -> bool:
    """Move the cursor.  False: it does not stand `here`."""
    moved = update(counters).where(_IS_CURSOR, counters.c.value == here).values(value=there)
    if tx.connection.execute(moved).rowcount == 1:
        return True
    if here or tx.connection.execute(select(counters.c.value).where(_IS_CURSOR)).first() is not None:
        return False
    tx.connection.execute(insert(counters), {"name": CURSOR_COUNTER, "value": there})
    return True


def _skip(tx: Transaction, here: int) -> int | None:
    """Move the cursor on to what anybody wants; answers where it stands then.  None: it does not stand `here`."""
    if not _moves(tx, here, here):
        return None
    # Looked for now that nobody else moves it: who was behind may just have joined the others.
    there = max(_LEAST.fetch_value(tx.connection, {}) or here, here)
    return there if _moves(tx, here, there) else None


def _stands(tx: Transaction, here: int) -> bool:
    """Whether the cursor stands here, and goes on only when this transaction has ended."""
    same: Any = update(counters).where(_IS_CURSOR, counters.c.value == here).values(value=here)
    return tx.connection.execute(same).rowcount == 1


def _in_turn(found: Iterable[Subscription]) -> list[Subscription]:
    """The first of each tenant, then the second of each: one with very many keeps nobody's from their turn."""
    so_far: Counter[str] = Counter()
    ranked: list[tuple[int, int, Subscription]] = []
    for place, receiver in enumerate(found):
        ranked.append((so_far[receiver.tenant], place, receiver))
        so_far[receiver.tenant] += 1
    return [receiver for _, _, receiver in sorted(ranked, key=lambda it: it[:2])]


def _has_room(connection: Connection, receiver: Subscription) -> bool:
    return not receiver.breaker_is_open and count_pending(connection, receiver.id, MOST_PENDING) < MOST_PENDING


def _wants(receiver: Subscription, entry: OutboxEvent) -> bool:
    event = entry.event
    return entry.tenant == receiver.tenant and event.id > receiver.after_event and event.type in receiver.types


def _of(entry: OutboxEvent) -> tuple[int, str, str, int]:
    event = entry.event
    return event.id, event.job_id, event.type, event.at_ms
