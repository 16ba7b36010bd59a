"""Credits: what jobs hold and cost, written in the transactions that accept and end them.

    grant     granted ──▶ available      an operator's act; withdraw: back
    reserve   available ──▶ held         a job is accepted, or revived
    settle    held ──▶ spent             it has ended: `amount` is charged, the rest is available again
    refund    spent ──▶ available        an operator's act

A row of `transfers` is never changed.  A tenant's balance is the sum of its rows in `balance_parts`, of which each
transaction adds one; so no row is updated by many, and an end waits for no other.  `fold` replaces them by their sum.

All amounts are micro-credits.  What was not the customer's fault costs nothing: only the slot time of the run that
ended the job is charged, and only where its server, or the job's own deadline or cancellation, ended it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import (
    BigInteger,
    CompoundSelect,
    Connection,
    Text,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal,
    null,
    select,
    text,
    union_all,
)

from slotkeeper.crash_points import crash_at
from slotkeeper.credit_amounts import format_credits
from slotkeeper.db import Database, Transaction
from slotkeeper.db.compiled_sql import BulkInsert, CompiledStatement
from slotkeeper.errors import InsufficientCredits
from slotkeeper.jobs.notifications import make_end_number
from slotkeeper.jobs.states import FINAL_STATES, Reason, State
from slotkeeper.jobs.tables import balance_parts, credit_accounts, jobs, transfers

Row: TypeAlias = Any

CHARGED_ENDS = frozenset({Reason.FINISHED, Reason.INVALID_REQUEST, Reason.DEADLINE_PASSED, Reason.CANCEL_REQUESTED})
"""Ends of a run that are charged, if its end was seen."""
MOST_PARTS = 200
"""Parts of a balance; more are replaced by their sum."""

_TRANSFERS = BulkInsert(transfers)
_PARTS = BulkInsert(balance_parts)
_COLUMNS = tuple(column.name for column in transfers.c if column.name != "id")
_EMPTY: dict[str, Any] = dict.fromkeys(_COLUMNS)
_SUMS = ("available", "held", "spent")


def _sum_of(column: Any) -> Any:
    """Return the sum of a column, as a number that both databases' drivers return as int."""
    return cast(func.coalesce(func.sum(column), 0), BigInteger)


_OVERDRAFT = (
    select(credit_accounts.c.overdraft)
    .where(credit_accounts.c.tenant == bindparam("p_tenant"), credit_accounts.c.closed_ms.is_(None))
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


def lock_of(tenant: str) -> str:
    """Return the lock under which credits of a tenant are reserved, and its parts are folded."""
    return f"credits of {tenant}"


# -- what a job holds --------------------------------------------------------------------------------------------


def find_shortage(tx: Transaction, needed: Mapping[str, int]) -> dict[str, InsufficientCredits]:
    """Return the tenants that have less available than is needed, each with the refusal.

    Under the locks of these tenants.  What earlier units of this transaction have reserved counts.
    """
    short = {}
    for tenant, amount in sorted(needed.items()):
        (found,) = _LEFT.fetch_all(tx.connection, {"p_tenant": tenant})
        collected = tx.added_up(_PARTS, {"tenant": tenant})
        available = found.available + (0 if collected is None else collected["available"])
        if found.overdraft is not None and available + found.overdraft < amount:
            short[tenant] = _shortage(tenant, available, found.overdraft, amount)
        elif found.parts > MOST_PARTS:
            fold(tx, tenant)
    return short


def _shortage(tenant: str, available: int, overdraft: int, needed: int) -> InsufficientCredits:
    further = f" and may go {format_credits(overdraft)} below 0" if overdraft else ""
    return InsufficientCredits(
        f"Tenant {tenant!r} has {format_credits(available)} credits available{further}, and this needs "
        f"{format_credits(needed)} reserved; ask the operator for credits, or wait until running jobs release theirs.",
        tenant=tenant,
        available=available,
        needed=needed,
    )


def reserve(tx: Transaction, job: Row, seq: int, attempt: int, now_ms: int) -> None:
    """Hold `job.reserved` for a job that is accepted or revived; nothing if it costs nothing."""
    if job.reserved is not None:
        about = {"seq": seq, "job_id": job.id, "model": job.model, "price": job.price, "number": attempt}
        _move(tx, job.tenant, "reserve", job.reserved, now_ms, Balance(-job.reserved, job.reserved), about)


def settle(tx: Transaction, row: Row, to: State, why: Reason, at_ms: int, run_ended_ms: int | None) -> None:
    """Charge a job that has ended, and release the rest of what it held; nothing if it costs nothing.

    row: as its UPDATE returned it, so that each job is settled once.  run_ended_ms: when its server ended the run;
    None: no run ended so, or nobody saw it.
    """
    if row.reserved is None:
        return
    held, slot_ms = -row.reserved, 0
    if run_ended_ms is not None and why in CHARGED_ENDS:
        if why is Reason.DEADLINE_PASSED:
            run_ended_ms = min(run_ended_ms, row.deadline_ms)
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
    _move(tx, row.tenant, "settle", amount, at_ms, Balance(held - amount, -held, amount), about)


def move_by_operator(
    tx: Transaction, tenant: str, kind: str, amount: int, now_ms: int, about: Mapping[str, Any]
) -> None:
    """Grant, withdraw or refund credits.  about: further columns of the transfer."""
    by = {
        "grant": Balance(available=amount),
        "withdraw": Balance(available=-amount),
        "refund": Balance(available=amount, spent=-amount),
    }
    _move(tx, tenant, kind, amount, now_ms, by[kind], about)


def _move(
    tx: Transaction, tenant: str, kind: str, amount: int, at_ms: int, by: Balance, about: Mapping[str, Any]
) -> None:
    row = {**_EMPTY, "tenant": tenant, "kind": kind, "amount": amount, "at_ms": at_ms, **about}
    tx.insert(_TRANSFERS, row)
    tx.add_up(_PARTS, {"tenant": tenant}, by._asdict())


# -- balances ----------------------------------------------------------------------------------------------------


def read_balance(connection: Connection, tenant: str) -> Balance:
    (sums,) = _BALANCE.fetch_all(connection, {"p_tenant": tenant})
    return Balance(*sums)


def read_balances(connection: Connection) -> dict[str, Balance]:
    """Return the balances of all tenants that have one."""
    return {row.tenant: Balance(*row[1:]) for row in _BALANCES.fetch_all(connection, {})}


def fold(tx: Transaction, tenant: str) -> None:
    """Replace the parts of a tenant's balance by their sum.  Under its lock."""
    parts = _TAKE_PARTS.fetch_all(tx.connection, {"p_tenant": tenant})
    if parts:
        sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
        tx.connection.execute(insert(balance_parts), {"tenant": tenant, **sums})


def fold_all(database: Database) -> int:
    """Fold the balances that have more than MOST_PARTS parts, and return how many."""
    with database.read() as connection:
        many = [row.tenant for row in _MANY_PARTS.fetch_all(connection, {"p_most": MOST_PARTS})]
    for tenant in many:
        database.write(partial(fold, tenant=tenant), durable=False, locks=frozenset({lock_of(tenant)}))
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
    """What the jobs of a batch cost, in micro-credits.  slot_ms: what was charged."""

    held: int
    charged: int
    slot_ms: int


def read_cost_of_batch(database: Database, tenant: str, batch: str) -> BatchSums:
    """Return what the jobs of a batch that are stored cost."""
    of_batch = (text("jobs.batch IS NOT NULL"), jobs.c.tenant == tenant, jobs.c.batch == batch)
    held = select(_sum_of(jobs.c.reserved)).where(*of_batch, jobs.c.reserved > 0)
    charged = case(
        (transfers.c.kind == "settle", transfers.c.amount), (transfers.c.kind == "refund", -transfers.c.amount)
    )
    query = (
        select(_sum_of(charged), _sum_of(transfers.c.slot_ms))
        .select_from(jobs)
        .join(transfers, transfers.c.seq == jobs.c.seq)
        .where(*of_batch, jobs.c.reserved.is_not(None))
    )
    with database.read() as connection:
        return BatchSums(connection.execute(held).scalar_one(), *connection.execute(query).one())


def carry_old(database: Database, tenant: str, before_ms: int, limit: int) -> int:
    """Replace up to `limit` transfers from before a time by one for each kind, and return how many were replaced.

    The sums stay the same in each transaction (CREDIT-1).
    """
    oldest = (
        select(transfers.c.id)
        .where(transfers.c.tenant == tenant, transfers.c.at_ms < before_ms)
        .where(transfers.c.why.is_(None) | (transfers.c.why != CARRIED))
        .order_by(transfers.c.id)
        .limit(limit)
    )

    def unit(tx: Transaction) -> int:
        ids = tx.connection.execute(oldest).scalars().all()
        rows = tx.connection.execute(delete(transfers).where(transfers.c.id.in_(ids)).returning(transfers)).all()
        for kind in sorted({row.kind for row in rows}):
            of_kind = [row for row in rows if row.kind == kind]
            carried = {
                "tenant": tenant,
                "kind": kind,
                "amount": sum(row.amount for row in of_kind),
                "at_ms": max(row.at_ms for row in of_kind),
                "reserved": _sum_known(row.reserved for row in of_kind),
                "slot_ms": _sum_known(row.slot_ms for row in of_kind),
                "why": CARRIED,
            }
            tx.insert(_TRANSFERS, {**_EMPTY, **carried})
        return len(rows)

    return database.write(unit, locks=frozenset({lock_of(tenant)}))


CARRIED = "carried"
"""The reason of a transfer that stands for older ones."""


def _sum_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
