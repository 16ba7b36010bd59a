"""Credits: what jobs hold and cost, written in the transactions that accept and end them.

    grant     granted ──▶ available      an operator's act; withdraw: back
    reserve   available ──▶ held         a job is accepted, or revived
    settle    held ──▶ spent             it has ended: `amount` is charged, the rest is available again
    refund    spent ──▶ available        an operator's act

A row of `transfers` is never changed.  A tenant's balance is the sum of its rows in `balance_parts`; each transaction
adds one, so no row is updated by many, and an end waits for no other.  `fold` replaces them by their sum.

All amounts are micro-credits.  What was not the customer's fault costs nothing: only the slot time of the run that
ended the job is charged, and only where its server, or the job's own deadline or cancellation, ended it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from sqlalchemy import (
    BigInteger,
    CompoundSelect,
    Connection,
    Engine,
    Text,
    bindparam,
    case,
    cast,
    delete,
    exists,
    func,
    insert,
    literal,
    null,
    select,
    text,
    union_all,
    update,
)

from slotkeeper.crash_points import crash_at
from slotkeeper.credit_amounts import format_credits
from slotkeeper.db import Database, Transaction
from slotkeeper.db.compiled_sql import BulkInsert, CompiledStatement
from slotkeeper.errors import Conflict, InsufficientCredits
from slotkeeper.jobs.notifications import make_end_number
from slotkeeper.jobs.states import FINAL_STATES, Reason, State
from slotkeeper.jobs.tables import balance_parts, credit_accounts, jobs, transfers

Row: TypeAlias = Any

CHARGED_ENDS = frozenset({Reason.FINISHED, Reason.INVALID_REQUEST, Reason.DEADLINE_PASSED, Reason.CANCEL_REQUESTED})
"""Ends of a run that are charged, if its end was seen."""
MOST_PARTS = 200
"""Parts of a balance; more are replaced by their sum."""
_UNLIMITED = 2**60
# A run that is ended by its deadline later than this: maintenance was away, and its worker may have been.
_SEEN_WITHIN_MS = 10_000

_OF_ONE_TRANSFER = ("seq", "job_id", "number", "model", "server", "price", "why", "actor", "reference")
_OF_ACTS = ("seq", "job_id", "number", "model", "why", "actor", "reference")
_PARTS = BulkInsert(balance_parts)
# Of each kind the columns that it has; an INSERT with all columns takes a third longer.
_RESERVES, _SETTLES, _ACTS = (BulkInsert(transfers) for _ in range(3))
_SUMS = ("available", "held", "spent")


def _sum_of(column: Any) -> Any:
    """Return the sum of a column, as a number that both databases' drivers return as int."""
    return cast(func.coalesce(func.sum(column), 0), BigInteger)


# A closed account refuses nothing; without one, which was removed just now, nothing can be reserved.
_OVERDRAFT = (
    select(case((credit_accounts.c.closed_ms.is_(None), credit_accounts.c.overdraft), else_=_UNLIMITED))
    .where(credit_accounts.c.tenant == bindparam("p_tenant"))
    .scalar_subquery()
)
_LEFT = CompiledStatement(
    select(
        _OVERDRAFT.label("overdraft"),
        _sum_of(balance_parts.c.available).label("available"),
        func.count().label("parts"),
    ).where(balance_parts.c.tenant == bindparam("p_tenant"))
)
_BALANCE = CompiledStatement(
    select(*(_sum_of(balance_parts.c[name]).label(name) for name in _SUMS)).where(
        balance_parts.c.tenant == bindparam("p_tenant")
    )
)
_BALANCES = CompiledStatement(
    select(balance_parts.c.tenant, *(_sum_of(balance_parts.c[name]).label(name) for name in _SUMS)).group_by(
        balance_parts.c.tenant
    )
)
_TAKE_PARTS = CompiledStatement(
    delete(balance_parts)
    .where(balance_parts.c.tenant == bindparam("p_tenant"))
    .returning(*(balance_parts.c[name] for name in _SUMS))
)
_MANY_PARTS = CompiledStatement(
    select(balance_parts.c.tenant)
    .group_by(balance_parts.c.tenant)
    .having(func.count() > bindparam("p_most"))
    .order_by(balance_parts.c.tenant)
)


class Balance(NamedTuple):
    """Sums of a tenant in micro-credits.  available: may fall below 0.  held: for jobs that have not ended."""

    available: int = 0
    held: int = 0
    spent: int = 0


# -- what a job holds --------------------------------------------------------------------------------------------

_left_at_last: WeakKeyDictionary[Engine, dict[str, int]] = WeakKeyDictionary()
"""What tenants could still reserve after this process's last reservation; PostgreSQL alone."""


def lock_of(tenant: str) -> str:
    """Return the lock under which it is decided what a tenant may still reserve or withdraw."""
    return f"credits of {tenant}"


def find_shortage(tx: Transaction, needed: Mapping[str, int]) -> dict[str, InsufficientCredits]:
    """Return the tenants that have less available than is needed, each with the refusal, before anything is written.

    What earlier units of this transaction have reserved counts.  On PostgreSQL other processes reserve at the same
    time.  So the transaction looks again at its end, under a lock of the tenant; here it looks only if this process
    last saw too little.
    """
    short = {}
    for tenant, amount in sorted(needed.items()):
        if not tx.is_alone and _left_at_last.setdefault(tx.connection.engine, {}).get(tenant, amount) >= amount:
            continue
        account = _read_account(tx, tenant)
        if account.left < amount:
            short[tenant] = _shortage(tenant, account, amount)
        elif account.parts > MOST_PARTS and tx.is_alone:
            fold(tx, tenant)
    return short


def _check_reserved(tx: Transaction, tenant: str) -> None:
    """Raise InsufficientCredits if this transaction leads the tenant's balance too far below 0.  Under its lock."""
    account = _read_account(tx, tenant)
    _left_at_last.setdefault(tx.connection.engine, {})[tenant] = account.left
    if account.left < 0 and account.collected < 0:
        needed = -account.collected
        raise _shortage(tenant, account._replace(available=account.available + needed), needed)
    if account.parts > MOST_PARTS:
        fold(tx, tenant)


class _AccountNow(NamedTuple):
    """What a tenant has.  available: with what this transaction has collected, which is in no row yet."""

    available: int
    overdraft: int
    parts: int
    collected: int

    @property
    def left(self) -> int:
        """How much may be reserved."""
        return self.available + self.overdraft


def _read_account(tx: Transaction, tenant: str) -> _AccountNow:
    (found,) = _LEFT.fetch_all(tx.connection, {"p_tenant": tenant})
    row = tx.added_up(_PARTS, {"tenant": tenant})
    collected = 0 if row is None else row["available"]
    return _AccountNow(found.available + collected, found.overdraft or 0, found.parts, collected)


def _shortage(tenant: str, account: _AccountNow, needed: int) -> InsufficientCredits:
    further = f" and may go {format_credits(account.overdraft)} below 0" if account.overdraft else ""
    return InsufficientCredits(
        f"Tenant {tenant!r} has {format_credits(account.available)} credits available{further}, and this needs "
        f"{format_credits(needed)} reserved; ask the operator for credits, or wait until running jobs release theirs.",
        tenant=tenant,
        available=account.available,
        needed=needed,
    )


def has_open_account(connection: Connection, tenant: str) -> bool:
    is_open = (credit_accounts.c.tenant == tenant) & credit_accounts.c.closed_ms.is_(None)
    return connection.execute(select(credit_accounts.c.tenant).where(is_open)).first() is not None


def make_free(tx: Transaction, seq: int) -> None:
    """Let a job that holds nothing cost nothing from now on."""
    tx.connection.execute(update(jobs).where(jobs.c.seq == seq).values(reserved=None, price=None))


def reserve(tx: Transaction, job: Row, seq: int, attempt: int, now_ms: int) -> None:
    """Hold `job.reserved` for a job that costs something and is accepted or revived."""
    about = {"seq": seq, "job_id": job.id, "model": job.model, "price": job.price, "number": attempt}
    tx.check_locked(lock_of(job.tenant), _check_reserved, job.tenant)
    _move(tx, _RESERVES, job.tenant, "reserve", job.reserved, now_ms, Balance(-job.reserved, job.reserved), about)


def settle(tx: Transaction, row: Row, to: State, why: Reason, at_ms: int, run_ended_ms: int | None) -> None:
    """Charge a job that costs something and has ended, and release the rest of its reservation.

    row: as its UPDATE returned it, so that each job is settled once.  run_ended_ms: when its server ended the run;
    None: no run ended so, or that was not seen.  A run that only waited for an earlier request costs nothing.
    """
    held, slot_ms = -row.reserved, 0
    was_answered = why in (Reason.FINISHED, Reason.INVALID_REQUEST)
    was_sent = row.remote_id is not None or row.sent_ms is None or row.sent_ms >= row.started_ms
    if run_ended_ms is not None and why in CHARGED_ENDS and (was_answered or was_sent):
        if why is Reason.DEADLINE_PASSED:
            run_ended_ms = _end_by_deadline(run_ended_ms, row)
        slot_ms = max(run_ended_ms - max(row.started_ms, row.sent_ms or 0), 0)
    amount = row.price * slot_ms // 1000
    about = {
        "seq": row.seq,
        "job_id": row.id,
        "model": row.model,
        "price": row.price,
        "number": make_end_number(row.attempt, to),
        "server": row.server,
        "reserved": held,
        "slot_ms": slot_ms,
        "why": why.value,
    }
    _move(tx, _SETTLES, row.tenant, "settle", amount, at_ms, Balance(held - amount, -held, amount), about)


def _end_by_deadline(seen_ms: int, row: Row) -> int:
    """Return until when a run is charged that its deadline ended: its start, if that was noticed too late."""
    return min(seen_ms, row.deadline_ms) if seen_ms - row.deadline_ms <= _SEEN_WITHIN_MS else row.started_ms


def move_by_operator(
    tx: Transaction, tenant: str, kind: str, amount: int, now_ms: int, about: Mapping[str, Any]
) -> None:
    """Grant, withdraw or refund credits.  about: further columns of the transfer."""
    by = {
        "grant": Balance(available=amount),
        "withdraw": Balance(available=-amount),
        "refund": Balance(available=amount, spent=-amount),
    }
    _move(tx, _ACTS, tenant, kind, amount, now_ms, by[kind], {**dict.fromkeys(_OF_ACTS), **about})
    if kind == "withdraw":
        tx.check_locked(lock_of(tenant), _check_withdrawn, tenant)


def _check_withdrawn(tx: Transaction, tenant: str) -> None:
    """Raise Conflict if this transaction withdraws more than is available.  Under the tenant's lock."""
    if _read_account(tx, tenant).available < 0:
        raise Conflict(f"The credits of tenant {tenant!r} were reserved meanwhile; look at its balance again.")


def _move(
    tx: Transaction,
    into: BulkInsert,
    tenant: str,
    kind: str,
    amount: int,
    at_ms: int,
    by: Balance,
    about: Mapping[str, Any],
) -> None:
    tx.insert(into, {"tenant": tenant, "kind": kind, "amount": amount, "at_ms": at_ms, **about})
    tx.add_up(_PARTS, {"tenant": tenant}, by._asdict())


# -- balances ----------------------------------------------------------------------------------------------------


def read_balance(connection: Connection, tenant: str) -> Balance:
    (sums,) = _BALANCE.fetch_all(connection, {"p_tenant": tenant})
    return Balance(*sums)


def balance_in(tx: Transaction, tenant: str) -> Balance:
    """Return a balance with what this transaction has collected, which is in no row yet."""
    stored, row = read_balance(tx.connection, tenant), tx.added_up(_PARTS, {"tenant": tenant})
    return stored if row is None else Balance(*(getattr(stored, name) + row[name] for name in _SUMS))


def read_balances(connection: Connection) -> dict[str, Balance]:
    """Return the balances of all tenants that have one."""
    return {row.tenant: Balance(*row[1:]) for row in _BALANCES.fetch_all(connection, {})}


def fold(tx: Transaction, tenant: str) -> None:
    """Replace the parts of a tenant's balance by their sum.  Each part is deleted by one transaction."""
    parts = _TAKE_PARTS.fetch_all(tx.connection, {"p_tenant": tenant})
    if parts:
        sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
        tx.connection.execute(insert(balance_parts), {"tenant": tenant, **sums})


def fold_all(database: Database) -> int:
    """Fold the balances that have more than MOST_PARTS parts, and return how many."""
    with database.read() as connection:
        many = [row.tenant for row in _MANY_PARTS.fetch_all(connection, {"p_most": MOST_PARTS})]
    for tenant in many:
        database.write(partial(fold, tenant=tenant), durable=False)
        crash_at("parts_folded")
    return len(many)


# -- CREDIT-1 ----------------------------------------------------------------------------------------------------


_NOTHING = Balance()


@dataclass(slots=True)
class Books:
    """What the tables say of one tenant's credits, at one moment.

    parts: its balance.  by_transfers: the same, from its transfers; None: they were not read.  granted: grants without
    withdrawals.  reserved: held by its jobs.  ended: of these, held by jobs that have ended.
    """

    parts: Balance = _NOTHING
    by_transfers: Balance | None = None
    granted: int = 0
    reserved: int = 0
    ended: int = 0

    @property
    def differences(self) -> list[str]:
        """What does not agree (CREDIT-1), as sentences; none: they balance."""
        found = []
        if self.parts.held != self.reserved:
            found.append(f"held {self.parts.held}, and its jobs hold {self.reserved}")
        if self.ended:
            found.append(f"jobs that have ended hold {self.ended}")
        if self.by_transfers is not None and self.parts != self.by_transfers:
            found.append(f"balance {tuple(self.parts)}, and its transfers say {tuple(self.by_transfers)}")
        if self.by_transfers is not None and sum(self.parts) != self.granted:
            found.append(f"granted {self.granted}, and its balance sums to {sum(self.parts)}")
        return found


def _books_query(with_transfers: bool) -> CompoundSelect[Any]:
    """Return (source, tenant, kind, a, b, c): one statement, and so one snapshot."""
    none, zero = null().cast(Text), literal(0, BigInteger)
    final = jobs.c.state.in_([state.value for state in sorted(FINAL_STATES)])
    queries = [
        select(
            literal("parts").label("source"),
            balance_parts.c.tenant.label("tenant"),
            none.label("kind"),
            *(_sum_of(balance_parts.c[name]).label(letter) for name, letter in zip(_SUMS, "abc", strict=True)),
        ).group_by(balance_parts.c.tenant),
        select(
            literal("jobs"),
            jobs.c.tenant,
            none,
            _sum_of(jobs.c.reserved),
            _sum_of(case((final, jobs.c.reserved), else_=0)),
            zero,
        )
        .where(jobs.c.reserved > 0)
        .group_by(jobs.c.tenant),
    ]
    if with_transfers:
        queries.append(
            select(
                literal("transfers"),
                transfers.c.tenant,
                transfers.c.kind,
                _sum_of(transfers.c.amount),
                _sum_of(transfers.c.reserved),
                zero,
            ).group_by(transfers.c.tenant, transfers.c.kind)
        )
    return union_all(*queries)


_BOOKS = {with_transfers: _books_query(with_transfers) for with_transfers in (False, True)}


def read_books(database: Database, *, with_transfers: bool) -> dict[str, Books]:
    """Return the books of all tenants that have any.  with_transfers: read all transfers, which may be millions."""
    with database.read(unbounded=True) as connection:
        rows = connection.execute(_BOOKS[with_transfers]).all()
    books: dict[str, Books] = {}
    by_kind: dict[str, Counter[str]] = {}
    for source, tenant, kind, a, b, c in rows:
        one = books.setdefault(tenant, Books())
        if source == "parts":
            one.parts = Balance(a, b, c)
        elif source == "jobs":
            one.reserved, one.ended = a, b
        else:
            by_kind.setdefault(tenant, Counter()).update({kind: a, f"{kind} reserved": b})
    if with_transfers:
        for tenant, one in books.items():
            sums = by_kind.get(tenant, Counter())
            one.granted = sums["grant"] - sums["withdraw"]
            one.by_transfers = _balance_of(sums)
    return books


def _balance_of(sums: Mapping[str, int]) -> Balance:
    """Return the balance that sums of transfers by kind make."""
    held = sums["reserve"] - sums["settle reserved"]
    spent = sums["settle"] - sums["refund"]
    available = sums["grant"] - sums["withdraw"] - sums["reserve"] + sums["refund"]
    return Balance(available + sums["settle reserved"] - sums["settle"], held, spent)


def find_unbalanced(database: Database, *, with_transfers: bool) -> dict[str, list[str]]:
    """Return the tenants whose books do not balance (CREDIT-1), with what does not agree."""
    books = read_books(database, with_transfers=with_transfers)
    return {tenant: one.differences for tenant, one in books.items() if one.differences}


# -- transfers ---------------------------------------------------------------------------------------------------


def list_transfers(database: Database, tenant: str, before: int | None, limit: int, after: int = 0) -> Sequence[Row]:
    """Return the newest transfers of a tenant after one.  before: the id of the last one of the page before."""
    in_account = (transfers.c.tenant == tenant, transfers.c.id > after)
    query = select(transfers).where(*in_account).order_by(transfers.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(transfers.c.id < before)
    with database.read() as connection:
        return connection.execute(query).all()


def list_of_job(database: Database, seq: int) -> Sequence[Row]:
    """Return the transfers of a job, the oldest first."""
    query = select(transfers).where(transfers.c.seq == seq).order_by(transfers.c.id)
    with database.read() as connection:
        return connection.execute(query).all()


class BatchSums(NamedTuple):
    """The costs of the jobs of a batch, in micro-credits.  slot_ms: the time that was charged."""

    held: int
    charged: int
    slot_ms: int


def read_cost_of_batch(database: Database, tenant: str, batch: str) -> BatchSums:
    """Return what the jobs of a batch that are stored cost."""
    of_batch = (text("jobs.batch IS NOT NULL"), jobs.c.tenant == tenant, jobs.c.batch == batch)
    held = select(_sum_of(jobs.c.reserved)).where(*of_batch, jobs.c.reserved > 0).scalar_subquery()
    charged = case(
        (transfers.c.kind == "settle", transfers.c.amount), (transfers.c.kind == "refund", -transfers.c.amount)
    )
    query = (
        select(held, _sum_of(charged), _sum_of(transfers.c.slot_ms))
        .select_from(jobs)
        .join(transfers, transfers.c.seq == jobs.c.seq)
        .where(*of_batch, jobs.c.reserved.is_not(None))
    )
    with database.read() as connection:
        return BatchSums(*connection.execute(query).one())


class CarryKey(NamedTuple):
    """What is added up together.  is_earlier: of an earlier tenant of this name."""

    tenant: str
    kind: str
    is_earlier: bool


_ERA = func.coalesce(
    select(credit_accounts.c.after_transfer).where(credit_accounts.c.tenant == transfers.c.tenant).scalar_subquery(), 0
)
_NEXT_OLD = (
    select(transfers, (transfers.c.id <= _ERA).label("is_earlier"))
    .where(transfers.c.carried == 0, transfers.c.id > bindparam("p_after"))
    .where(~exists().where(jobs.c.seq == transfers.c.seq))
    .order_by(transfers.c.id)
)
_CARRIED = select(transfers.c.id, transfers.c.tenant, transfers.c.kind, (transfers.c.id <= _ERA).label("is_earlier"))


def carry_old(database: Database, before_ms: int, after: int, limit: int) -> int | None:
    """Add the next transfers from before a time to the one that stands for all older ones of their tenant and kind.

    after: the id of the last transfer of the call before; 0: begin.  Returns that of this call; None: there are no
    more.  Transfers of jobs that are stored stay.  The sums stay the same in each transaction (CREDIT-1).
    """
    with database.read() as connection:
        page = connection.execute(_NEXT_OLD.limit(limit), {"p_after": after}).all()
    old = [row for row in page if row.at_ms < before_ms]
    if old:
        database.write(partial(_carry, old=old))
    return page[-1].id if len(page) == limit and len(old) == limit else None


def _carry(tx: Transaction, old: Sequence[Row]) -> None:
    ids = [row.id for row in old]
    left = transfers.c.id.in_(ids), transfers.c.carried == 0
    # Locked: another process may carry them at the same time.
    stored = set(tx.connection.execute(select(transfers.c.id).where(*left).with_for_update()).scalars())
    sums: dict[CarryKey, list[Row]] = {}
    for row in (row for row in old if row.id in stored):
        sums.setdefault(CarryKey(row.tenant, row.kind, bool(row.is_earlier)), []).append(row)
    tenants = sorted({key.tenant for key in sums})
    known = tx.connection.execute(_CARRIED.where(transfers.c.carried == 1, transfers.c.tenant.in_(tenants)))
    into = {CarryKey(row.tenant, row.kind, bool(row.is_earlier)): row.id for row in known}
    for key, rows in sorted(sums.items()):
        target = into.get(key, rows[0].id)
        others = [row for row in rows if row.id != target]
        added = {
            "amount": transfers.c.amount + sum(row.amount for row in others),
            "reserved": func.coalesce(transfers.c.reserved, 0) + sum(row.reserved or 0 for row in others),
            "slot_ms": func.coalesce(transfers.c.slot_ms, 0) + sum(row.slot_ms or 0 for row in others),
            "at_ms": max(row.at_ms for row in rows),
            "carried": 1,
        }
        tx.connection.execute(
            update(transfers).where(transfers.c.id == target).values(**dict.fromkeys(_OF_ONE_TRANSFER), **added)
        )
        tx.connection.execute(delete(transfers).where(transfers.c.id.in_([row.id for row in others])))
