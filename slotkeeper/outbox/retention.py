"""Delete jobs, events and logs past their time, unless something still needs them.

jobs      An ended job is deleted with its messages and notifications, and the ledger still balances (JOB-3).  It stays
          while one of its messages is pending, because the message is made from the job (HOOK-1).
events    Events outlive their jobs.  An event stays while its job is stored, and until every sink has it.
logs      The delivery log and the messages that were given up are bounded for each webhook.
"""

from collections import Counter
from collections.abc import Sequence

from sqlalchemy import ColumnElement, Integer, and_, bindparam, delete, select, update

from slotkeeper import audit
from slotkeeper.clock import clock
from slotkeeper.db import Database, Transaction
from slotkeeper.db.pages import PAGE, delete_page, run_pages
from slotkeeper.db.schema import add_to_counter, raise_counter_to
from slotkeeper.errors import Conflict
from slotkeeper.jobs.statements import in_state, unindexed
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import envelopes, events, jobs, messages, result_notifications
from slotkeeper.outbox.event_reader import REMOVED_COUNTER
from slotkeeper.outbox.subscriptions import ENABLED, FAILURES_TO_OPEN, REASON_SILENT, Subscriptions, get_cursor
from slotkeeper.outbox.tables import receivers, tries
from slotkeeper.outbox.webhook_messages import IS_GIVEN_UP, message_from_row

MOST_LOGGED = 1000
"""Attempts of one webhook in the delivery log."""
LOGGED_MS = 7 * 24 * 3600 * 1000
"""How long the delivery log keeps an attempt."""
MOST_GIVEN_UP = 1000
"""Messages of one webhook that are kept as given up."""

_MAX_ID = (1 << 63) - 1
_DELETABLE_COUNTER = "events.of_age_ms"
"""The counter that a trigger reads: audit entries before this time may be deleted."""
_EVENTS = (
    select(events.c.id, events.c.at_ms, events.c.actor, jobs.c.seq.label("job"))
    .select_from(events.outerjoin(jobs, jobs.c.id == events.c.job_id))
    .where(events.c.id > bindparam("p_after"), events.c.id <= bindparam("p_last"))
    .order_by(events.c.id)
    .limit(bindparam("p_limit", type_=Integer))
)
_IS_DEAD = (jobs.c.id == bindparam("p_id")) & in_state(State.DEAD)
_DEAD = select(jobs.c.seq, jobs.c.model, jobs.c.tenant).where(_IS_DEAD).with_for_update()
# A subquery for each job: for `NOT IN`, PostgreSQL would read all messages.
HAS_PENDING_MESSAGE = (
    select(messages.c.event)
    .where(messages.c.job_id == jobs.c.id, unindexed(messages.c.state) == "pending")
    .limit(1)
    .scalar_subquery()
    .is_not(None)
)
"""The condition under which a job must stay in the database (HOOK-1)."""

# -- jobs ----------------------------------------------------------------------------------------------------------


def delete_ended_jobs(database: Database, ended_before_ms: int, limit: int = 500) -> int:
    """Delete at most `limit` jobs that ended before a time, and return their number."""
    # Only ended jobs have an end.  A condition on the state would let the database choose the index of states.
    old = and_(jobs.c.finished_ms < ended_before_ms, ~HAS_PENDING_MESSAGE)
    with database.read() as connection:  # Outside of the transaction, so that the search blocks no writer.
        seqs = connection.execute(select(jobs.c.seq).where(old).limit(limit)).scalars().all()
    if not seqs:
        return 0
    # The condition is repeated, because a dead job may have been revived since the search.
    return database.write(lambda tx: _delete_jobs(tx, jobs.c.seq.in_(seqs) & old))


def delete_dead_job(database: Database, job_id: str) -> bool:
    """Delete a dead job.

    Returns False if the job is not dead.  Raises Conflict while a webhook still has to receive events of the job.
    """
    entry = audit.make_entry("job.delete", job_id=job_id)

    def unit(tx: Transaction) -> bool | Conflict:
        # FOR UPDATE: on PostgreSQL the job could otherwise be revived and end again, with a new pending message.
        dead = tx.connection.execute(_DEAD, {"p_id": job_id}).first()
        if dead is None:
            return False
        objection = find_objection(tx, job_id)
        if objection is not None:
            return objection
        entry.write(tx, model=dead.model, tenant=dead.tenant)
        return _delete_jobs(tx, jobs.c.seq == dead.seq) == 1

    return database.write(unit)


def find_objection(tx: Transaction, job_id: str) -> Conflict | None:
    """Return why a job cannot be deleted: a subscription still has to receive one of its events; None: it can."""
    own = select(messages).where(
        messages.c.receiver == job_id, messages.c.job_id == job_id, messages.c.state == "pending"
    )
    if (pending := tx.connection.execute(own.limit(1)).first()) is not None:
        webhook_id = message_from_row(pending).id
        return Conflict(
            f"Job {job_id!r} still owes its webhook {webhook_id!r}, which would be lost with it; "
            "remove the job when that is delivered or given up.",
            job_id=job_id,
            webhook_id=webhook_id,
        )
    subscription_id = _find_webhook_with_pending(tx, job_id) or _find_webhook_before_events(tx, job_id)
    if subscription_id is None:
        return None
    return Conflict(
        f"The webhook {subscription_id!r} has not been told all of job {job_id!r}, and could not be without it; "
        "remove the job later, or disable the webhook first.",
        job_id=job_id,
        webhook=subscription_id,
    )


def _find_webhook_with_pending(tx: Transaction, job_id: str) -> str | None:
    """Return an enabled webhook that has a pending message of a job."""
    is_pending = (messages.c.job_id == job_id) & (messages.c.state == "pending") & (receivers.c.state == ENABLED)
    found = select(messages.c.receiver).join(receivers, receivers.c.id == messages.c.receiver).where(is_pending)
    return tx.connection.execute(found.limit(1)).scalar()


def _find_webhook_before_events(tx: Transaction, job_id: str) -> str | None:
    """Return an enabled webhook that receives an event of a job for which it has no message yet."""
    cursor = get_cursor(tx.connection)
    tenant = select(jobs.c.tenant).where(jobs.c.id == job_id).scalar_subquery()
    of_tenant = select(receivers.c.id, receivers.c.types, receivers.c.after_event, receivers.c.behind)
    enabled = tx.connection.execute(of_tenant.where(receivers.c.tenant == tenant, receivers.c.state == ENABLED)).all()
    of_job = tx.connection.execute(select(events.c.id, events.c.type).where(events.c.job_id == job_id)).all()
    for row in enabled:
        position = max(cursor, row.after_event) if row.behind is None else row.behind
        if any(event.id > position and f'"{event.type}"' in row.types for event in of_job):
            return str(row.id)
    return None


def _delete_jobs(tx: Transaction, condition: ColumnElement[bool]) -> int:
    """Delete jobs with their messages, notifications and callback logs, with a few statements for any number."""
    rows = tx.connection.execute(delete(jobs).where(condition).returning(jobs.c.id, jobs.c.state)).all()
    ids = [row.id for row in rows]
    if ids:
        tx.connection.execute(delete(result_notifications).where(result_notifications.c.job_id.in_(ids)))
        tx.connection.execute(delete(messages).where(messages.c.job_id.in_(ids)))
        tx.connection.execute(delete(tries).where(tries.c.receiver.in_(ids)))
        tx.connection.execute(delete(envelopes).where(envelopes.c.job_id.in_(ids)))
    for state, number in sorted(Counter(row.state for row in rows).items()):
        add_to_counter(tx.connection, f"purged.{state}", number)
    return len(rows)


# -- events --------------------------------------------------------------------------------------------------------


class EventRetention:
    """Deletes old events, page by page from the oldest on."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._after = 0  # the last event of the page before

    def delete_next(
        self, transitions_before_ms: int, audit_before_ms: int, last: int | None, limit: int = 1000
    ) -> int | None:
        """Delete old events among the next `limit` events, and return their number.

        transitions_before_ms, audit_before_ms: older transitions and older audit entries are deleted.
        last: no event after this one is deleted; None: no such bound.

        Returns None at the first page without old events; the next call begins with the oldest event again.
        Raises DatabaseUnavailable.
        """
        query = {"p_after": self._after, "p_last": _MAX_ID if last is None else last, "p_limit": limit}
        with self.database.read(unbounded=True) as connection:
            rows = connection.execute(_EVENTS, query).all()
        old = [row for row in rows if row.at_ms < max(transitions_before_ms, audit_before_ms)]
        if not old:
            self._after = 0
            return None
        self._after = old[-1].id
        ids = [
            row.id
            for row in old
            if (row.at_ms < audit_before_ms if row.actor is not None else row.at_ms < transitions_before_ms)
            and row.job is None
        ]
        if ids:
            self.database.write(lambda tx: _delete_events(tx, ids, audit_before_ms))
        return len(ids)


def _delete_events(tx: Transaction, ids: list[int], audit_before_ms: int) -> None:
    raise_counter_to(tx.connection, _DELETABLE_COUNTER, audit_before_ms)
    # So that a stream that resumes before this event reports the gap.
    raise_counter_to(tx.connection, REMOVED_COUNTER, ids[-1])
    tx.connection.execute(delete(events).where(events.c.id.in_(ids)))


# -- delivery logs and undelivered messages ------------------------------------------------------------------------


def trim(database: Database, subscription_ids: Sequence[str], now_ms: int, keep_ms: int) -> None:
    """Trim the delivery logs and given-up messages of these webhooks, and clean up after failing ones.

    keep_ms: a webhook that has been failing for this time is disabled; pending messages of disabled webhooks are given
    up after this time.
    """
    for subscription_id in subscription_ids:
        _trim_webhook(database, subscription_id, now_ms)
    for subscription_id in _list_silent(database, now_ms - keep_ms):
        Subscriptions(database).disable(subscription_id, None, None, REASON_SILENT, now_ms)
    run_pages(lambda: database.write(lambda tx: _give_up_disabled(tx, now_ms, keep_ms)))


def _list_silent(database: Database, before_ms: int) -> list[str]:
    """Return the enabled webhooks whose breaker is open and that have been failing since before a time."""
    silent = (receivers.c.state == ENABLED) & (receivers.c.failing_since_ms <= before_ms)
    with database.read() as connection:
        query = select(receivers.c.id).where(silent, receivers.c.failures >= FAILURES_TO_OPEN)
        return list(connection.execute(query).scalars())


def _trim_webhook(database: Database, subscription_id: str, now_ms: int) -> None:
    logged = tries.c.receiver == subscription_id
    last = select(tries.c.id).where(logged).order_by(tries.c.id.desc()).offset(MOST_LOGGED).limit(1).scalar_subquery()
    is_old = logged & ((tries.c.id <= last) | (tries.c.at_ms < clock.ago_ms(LOGGED_MS, now_ms)))
    run_pages(lambda: delete_page(database, tries, is_old))
    given_up = (messages.c.receiver == subscription_id) & IS_GIVEN_UP
    newest = select(messages.c.event).where(given_up).order_by(messages.c.event.desc())
    bound = newest.offset(MOST_GIVEN_UP).limit(1).scalar_subquery()
    run_pages(lambda: delete_page(database, messages, given_up & (messages.c.event <= bound)))


def _give_up_disabled(tx: Transaction, now_ms: int, keep_ms: int) -> int:
    """Give up at most PAGE old messages of disabled webhooks, whose jobs could not be deleted otherwise."""
    disabled = select(receivers.c.id).where(receivers.c.state != ENABLED)
    old = (messages.c.state == "pending") & (messages.c.owed_ms < now_ms - keep_ms)
    some = select(messages.c.receiver, messages.c.event).where(messages.c.receiver.in_(disabled), old).limit(PAGE)
    rows = tx.connection.execute(some).all()
    given_up = {"state": "given_up", "ended_ms": now_ms, "last_error": "Its webhook is disabled."}
    for row in rows:
        is_message = (messages.c.receiver == row.receiver) & (messages.c.event == row.event)
        tx.connection.execute(update(messages).where(is_message, old).values(given_up))
    return len(rows)
