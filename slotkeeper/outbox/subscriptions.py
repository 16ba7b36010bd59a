"""Receivers: addresses of a tenant that are told what happens to its jobs.

How a receiver does is noted here too: after failures in a row its breaker opens, and only one message in a while tries
whether it is back.  The time between two such trials grows with the time for which it has been failing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, TypeAlias

import orjson
import uuid_utils
from sqlalchemy import ColumnElement, Connection, Select, case, delete, func, insert, select, update

from slotkeeper import audit
from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import counters, storable_text
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES
from slotkeeper.jobs.tables import events, messages
from slotkeeper.jobs.values import Job
from slotkeeper.outbox.event_reader import EventReader
from slotkeeper.outbox.tables import receivers, tries

Row: TypeAlias = Any

ENABLED, DISABLED = "enabled", "disabled"
END_EVENT_TYPES = frozenset(EVENT_TYPES[state] for state in FINAL_STATES)
"""The events of which a subscription is told that names none."""
OVERLAP_MS = 24 * 3600 * 1000
"""For so long messages are signed with a former secret, too."""
FAILURES_TO_OPEN = 5
"""In a row; then a receiver's breaker is open."""
SHORTEST_COOLDOWN_MS, LONGEST_COOLDOWN_MS = 15_000, 300_000
"""Between two trials of a receiver whose breaker is open."""
_LONGEST_REASON = 500
REASON_GONE = "It answered 410: it is gone."
REASON_SILENT = "It has taken no message for too long."
AHEAD_MS = 1000
"""So long before its time a message of a receiver with a pace is claimed: longer than between two looks for them."""


CURSOR_COUNTER = "receivers.cursor"
"""The counter of the event up to which the receivers that are not behind have been told."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """`types`: of events.  `template`: JSON; None: the body is ours.  `behind`: the event up to which it is told,
    where it does not go with the others.  `failing_since_ms`: None, where its last message was taken.  `max_per_s`:
    messages that it is sent in a second; None: as many as there are."""

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
        """Whether only single messages try if it is back."""
        return self.failures >= FAILURES_TO_OPEN

    def seals(self, now_ms: int) -> list[str]:
        """The sealed secrets to sign with, the present one first."""
        overlaps = self.former_sealed is not None and now_ms < (self.former_until_ms or 0)
        return [self.sealed, self.former_sealed] if overlaps and self.former_sealed else [self.sealed]


@dataclass(frozen=True, slots=True)
class SendTime:
    """When one message may be sent, ms; the same in µs, where its receiver has a pace."""

    at_ms: int
    at_us: int | None = None


def claim_horizon_us(now_ms: int) -> int:
    """Up to when messages of receivers with a pace are claimed, in µs."""
    return (now_ms + AHEAD_MS) * 1000


def subscription_of_job(job: Job) -> "Subscription":
    """Return a job's `callback_url` as a subscription: for the ends of this job, signed with its tenant's secret."""
    return Subscription(job.id, job.tenant, job.callback_url or "", END_EVENT_TYPES, "", job.created_ms)


def new_id() -> str:
    return f"we_{uuid_utils.uuid7().hex}"


def cooldown_ms(failing_since_ms: int, now_ms: int) -> int:
    """How long a receiver that fails is left alone: a quarter of the time for which it has failed."""
    return min(max((now_ms - failing_since_ms) // 4, SHORTEST_COOLDOWN_MS), LONGEST_COOLDOWN_MS)


class Subscriptions:
    """Reads and changes them.  `tenant`, wherever it is taken: whose it must be; None: anybody's."""

    def __init__(self, database: Database) -> None:
        self.database = database

    # -- reading ---------------------------------------------------------------------------------------------

    def list_of_tenant(self, tenant: str | None = None, after: str = "", limit: int = 1000) -> list[Subscription]:
        """Those of a tenant, or of all, the oldest first, from the one with the id `after` on."""
        query = select(receivers).where(receivers.c.id > after, *_whose(tenant)).order_by(receivers.c.id).limit(limit)
        with self.database.read() as connection:
            return [_receiver(row) for row in connection.execute(query)]

    def get(self, receiver_id: str, tenant: str | None = None) -> Subscription:
        """Raises NotFound."""
        with self.database.read() as connection:
            return _found(connection, receiver_id, tenant)

    def count_pending(self, receiver_ids: Iterable[str]) -> dict[str, int]:
        """How many messages wait for each of them; those that have none are left out."""
        query = (
            select(messages.c.receiver, func.count())
            .where(messages.c.receiver.in_(list(receiver_ids)), messages.c.state == "pending")
            .group_by(messages.c.receiver)
        )
        with self.database.read() as connection:
            return dict(tuple(row) for row in connection.execute(query))

    # -- changing --------------------------------------------------------------------------------------------

    def add(self, receiver: Subscription, most: int) -> Subscription:
        """A new one, which is told of what happens from now on.  Raises Conflict: its tenant has `most` already."""
        after = EventReader(self.database).skip_to_end()  # Whoever has taken a lower number has ended.
        values = _values(receiver) | {"after_event": after}
        adding = _act("add", receiver.id, tenant=receiver.tenant)

        def unit(tx: Transaction) -> Subscription | Conflict:
            whose = receivers.c.tenant == receiver.tenant
            count = tx.connection.execute(select(func.count()).select_from(receivers).where(whose)).scalar() or 0
            if count >= most:
                return Conflict(
                    f"{receiver.tenant!r} has {count} webhooks, which is all it may have; remove one first, or have "
                    "the operator raise SLOTKEEPER_WEBHOOK_MOST_RECEIVERS.",
                    most=most,
                )
            tx.connection.execute(insert(receivers), values)
            adding.write(tx)
            return _found(tx.connection, receiver.id, None)

        return self.database.write(unit)

    def change(self, receiver_id: str, tenant: str | None, **values: Any) -> Subscription:
        """Change `url`, `types`, `template`, `description`, `max_per_s`.  Raises NotFound."""
        if "types" in values:
            values["types"] = _types(values["types"])
        if "max_per_s" in values:
            values["paced_until_us"] = 0
        return self._change("change", receiver_id, tenant, values)

    def rotate_secret(self, receiver_id: str, tenant: str | None, sealed: str, now_ms: int) -> Subscription:
        """A new secret.  The one before it is signed with for OVERLAP_MS, too; the one before that no more."""
        former = {"former_sealed": receivers.c.sealed, "former_until_ms": now_ms + OVERLAP_MS}
        return self._change("rotate", receiver_id, tenant, {"sealed": sealed, **former})

    def reseal(self, receiver: Subscription, sealed: str, former_sealed: str | None) -> bool:
        """The same secrets, sealed anew.  False: they have changed meanwhile."""
        same = (receivers.c.id == receiver.id) & (receivers.c.sealed == receiver.sealed)
        changed = update(receivers).where(same).values(sealed=sealed, former_sealed=former_sealed)
        return self.database.write(lambda tx: tx.connection.execute(changed).rowcount == 1)

    def enable(self, receiver_id: str, tenant: str | None, by: str, now_ms: int) -> Subscription:
        """Tell it again, from where it was disabled; its breaker closes."""
        return self._change("enable", receiver_id, tenant, _standing(ENABLED, None, by, now_ms) | _WELL)

    def disable(
        self, receiver_id: str, tenant: str | None, by: str | None, reason: str | None, now_ms: int
    ) -> Subscription:
        """Tell it nothing until it is enabled.  `by` None: it was nobody's act."""
        disabling = _act("disable", receiver_id, reason=reason)

        def unit(tx: Transaction) -> Subscription | NotFound:
            found = _disabled(tx, receiver_id, tenant, by, reason, now_ms)
            if isinstance(found, Subscription):
                disabling.write(tx, tenant=found.tenant)
            return found

        return self.database.write(unit)

    def disable_if_url(self, url: str, receiver_id: str, reason: str, now_ms: int) -> bool:
        """Disable it, which is nobody's act, unless it has another address by now, or is gone.  False: so it is."""
        disabling = _act("disable", receiver_id, reason=reason)

        def unit(tx: Transaction) -> bool:
            # Nobody changes it from here on.
            same = update(receivers).where(receivers.c.id == receiver_id, receivers.c.url == url).values(url=url)
            if tx.connection.execute(same).rowcount == 0:
                return False
            found = _disabled(tx, receiver_id, None, None, reason, now_ms)
            assert isinstance(found, Subscription), "it was here a moment ago"
            disabling.write(tx, tenant=found.tenant)
            return True

        return self.database.write(unit)

    def remove(self, receiver_id: str, tenant: str | None) -> None:
        """Forget it, with what it was owed and its log.  Raises NotFound."""
        removing = _act("remove", receiver_id)

        def unit(tx: Transaction) -> None:
            removing.write(tx, tenant=_found(tx.connection, receiver_id, tenant).tenant)
            _forget(tx, receivers.c.id == receiver_id)

        self.database.write(unit)

    def note_success(self, receiver: Subscription) -> None:
        """It has taken a message: its breaker closes.  Nothing is written where it was not failing."""
        if receiver.failures:
            well = update(receivers).where(receivers.c.id == receiver.id).values(_WELL)
            self.database.write(lambda tx: tx.connection.execute(well), durable=False)

    def note_failure(self, receiver: Subscription, now_ms: int, rest: int = 0) -> None:
        """It has not taken a message.  `rest`: ms for which it asked to be left alone."""
        since = receiver.failing_since_ms if receiver.failing_since_ms is not None else now_ms
        opens = receiver.failures + 1 >= FAILURES_TO_OPEN
        until = now_ms + max(rest, cooldown_ms(since, now_ms) if opens else 0)
        noted = (
            update(receivers)
            .where(receivers.c.id == receiver.id)
            .values(
                failures=receivers.c.failures + 1,
                failing_since_ms=func.coalesce(receivers.c.failing_since_ms, now_ms),
                # Another try may have been told to wait for longer.
                open_until_ms=case((receivers.c.open_until_ms < until, until), else_=receivers.c.open_until_ms),
            )
        )
        self.database.write(lambda tx: tx.connection.execute(noted), durable=False)

    def try_begin(self, tx: Transaction, receiver_id: str, now_ms: int, until: int) -> bool:
        """Whether a message may be sent now; of a receiver whose breaker is open one, which is over by `until`."""
        whose = (receivers.c.id == receiver_id) & (receivers.c.state == ENABLED) & (receivers.c.open_until_ms <= now_ms)
        failures = tx.connection.execute(select(receivers.c.failures).where(whose)).scalar()
        if failures is None or failures < FAILURES_TO_OPEN:
            return failures is not None
        return tx.connection.execute(update(receivers).where(whose).values(open_until_ms=until)).rowcount == 1

    def reserve_send_time(self, tx: Transaction, receiver_id: str, now_ms: int) -> "SendTime | None":
        """When the next message may be sent, by the receiver's pace; None: that is not soon.

        Turns stand in the record, so however many processes send, they are as far from each other as the pace says.
        """
        whose = receivers.c.id == receiver_id
        max_per_s = tx.connection.execute(select(receivers.c.max_per_s).where(whose)).scalar()
        if max_per_s is None:
            return SendTime(now_ms)
        now_us, gap_us = now_ms * 1000, round(1e6 / max_per_s)
        before = case((receivers.c.paced_until_us < now_us, now_us), else_=receivers.c.paced_until_us)
        taking = update(receivers).where(whose, receivers.c.paced_until_us <= claim_horizon_us(now_ms))
        taken = taking.values(paced_until_us=before + gap_us).returning(receivers.c.paced_until_us)
        until_us = tx.connection.execute(taken).scalar()
        return None if until_us is None else SendTime(ceil((until_us - gap_us) / 1000), until_us - gap_us)

    def return_send_time(self, tx: Transaction, receiver_id: str, turn: "SendTime") -> None:
        """In the transaction that took it: there is nothing to send."""
        if turn.at_us is not None:
            whose = receivers.c.id == receiver_id
            tx.connection.execute(update(receivers).where(whose).values(paced_until_us=turn.at_us))

    def _change(self, word: str, receiver_id: str, tenant: str | None, values: Mapping[str, Any]) -> Subscription:
        which = [receivers.c.id == receiver_id, *_whose(tenant)]
        changing = _act(word, receiver_id)

        def unit(tx: Transaction) -> Subscription:
            tx.connection.execute(update(receivers).where(*which).values(values))
            found = _found(tx.connection, receiver_id, tenant)
            changing.write(tx, tenant=found.tenant)
            return found

        return self.database.write(unit)


def _disabled(
    tx: Transaction, receiver_id: str, tenant: str | None, by: str | None, reason: str | None, now_ms: int
) -> Subscription | NotFound:
    """In a transaction: tell it nothing from here on, and remember where that is."""
    try:
        before = _found(tx.connection, receiver_id, tenant)
    except NotFound as unknown:
        return unknown
    here = max(get_cursor(tx.connection), before.after_event) if before.behind is None else before.behind
    values = _standing(DISABLED, reason, by, now_ms) | {"behind": here}
    tx.connection.execute(update(receivers).where(receivers.c.id == receiver_id).values(values))
    return _found(tx.connection, receiver_id, None)


def delete_of_tenant(tx: Transaction, tenant: str) -> None:
    """In a transaction: remove all receivers of a tenant; another one of this name shall not find them."""
    _forget(tx, receivers.c.tenant == tenant)


def _forget(tx: Transaction, which: ColumnElement[bool]) -> None:
    """Remove receivers, with what they were owed and their logs."""
    ids = tx.connection.execute(select(receivers.c.id).where(which)).scalars().all()
    for column in (messages.c.receiver, tries.c.receiver, receivers.c.id):
        tx.connection.execute(delete(column.table).where(column.in_(ids)))


def select_subscriptions(connection: Connection, *which: ColumnElement[bool]) -> list[Subscription]:
    """In a transaction: those for which this holds."""
    return [_receiver(row) for row in connection.execute(select(receivers).where(*which).order_by(receivers.c.id))]


def get_cursor(connection: Connection) -> int:
    """The event up to which the receivers that are not behind have been told."""
    return connection.execute(_CURSOR).scalar() or 0


def get_last_id(connection: Connection) -> int:
    """The number of the newest event; 0: there is none."""
    return connection.execute(select(func.max(events.c.id))).scalar() or 0


_CURSOR: Select[Any] = select(counters.c.value).where(counters.c.name == CURSOR_COUNTER)
_WELL: dict[str, Any] = {"failures": 0, "failing_since_ms": None, "open_until_ms": 0}


def _act(word: str, receiver_id: str, **about: Any) -> audit.AuditEntry:
    return audit.make_entry(f"webhook.{word}", webhook=receiver_id, **about)


def _standing(state: str, reason: str | None, by: str | None, now_ms: int) -> dict[str, Any]:
    reason = None if reason is None else storable_text(reason, _LONGEST_REASON)
    return {"state": state, "reason": reason, "changed_by": by, "changed_ms": now_ms}


def _whose(tenant: str | None) -> tuple[ColumnElement[bool], ...]:
    return () if tenant is None else (receivers.c.tenant == tenant,)


def _found(connection: Connection, receiver_id: str, tenant: str | None) -> Subscription:
    row = connection.execute(select(receivers).where(receivers.c.id == receiver_id, *_whose(tenant))).first()
    if row is None:
        raise NotFound("There is no such webhook; GET /webhooks lists them.", webhook=receiver_id)
    return _receiver(row)


def _types(types: Iterable[str]) -> str:
    return orjson.dumps(sorted(types)).decode()


def _values(it: Subscription) -> dict[str, Any]:
    return {name: getattr(it, name) for name in Subscription.__dataclass_fields__} | {"types": _types(it.types)}


def _receiver(row: Row) -> Subscription:
    return Subscription(**(row._asdict() | {"types": frozenset(orjson.loads(row.types))}))
