"""Accounts of tenants that pay for their jobs, and what operators do with them.

What jobs hold and cost: slotkeeper/jobs/credits.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import Connection, delete, func, insert, select, update

from slotkeeper.audit import commit_audited, get_actor, make_entry
from slotkeeper.credit_amounts import format_credits
from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import storable_text
from slotkeeper.errors import Conflict, IdempotencyConflict, NotFound
from slotkeeper.jobs import credits, events
from slotkeeper.jobs.credits import Balance
from slotkeeper.jobs.tables import credit_accounts, jobs, transfers
from slotkeeper.registry import catalog_changes
from slotkeeper.registry.catalog_changes import Change, Part
from slotkeeper.registry.identity import LOCAL_IDENTITY
from slotkeeper.registry.tables import tenants

Row: TypeAlias = Any

MAX_AMOUNT = 10**15
"""Micro-credits of one act: a billion credits."""
LOW_TYPE = "credit.low"
_MAX_REASON = 500


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant's account, and its balance in micro-credits.  spent: by this tenant.

    overdraft: how far below 0 a reservation may lead.  low_mark: the event credit.low is written when less is
    available; None: it is not.  low_since_ms: since when that is so.  closed_ms: since when its jobs cost nothing;
    None: it is open.
    """

    tenant: str
    overdraft: int
    low_mark: int | None
    low_since_ms: int | None
    opened_ms: int
    closed_ms: int | None
    available: int
    held: int
    spent: int
    after_transfer: int = 0  # the last of an earlier tenant of this name


@dataclass(frozen=True, slots=True)
class Act:
    """What an operator does with an account.  kind: grant, withdraw or refund.

    amount: micro-credits; None: of a refund, all that the job has cost.  reference: the same act is done once.
    job_id: of a refund.
    """

    kind: str
    amount: int | None
    reason: str
    reference: str
    job_id: str | None = None


def list_metered(connection: Connection) -> frozenset[str]:
    """Return the tenants whose jobs cost something."""
    is_open = credit_accounts.c.closed_ms.is_(None)
    return frozenset(connection.execute(select(credit_accounts.c.tenant).where(is_open)).scalars())


class CreditAccounts:
    """Reads and changes accounts.  All methods raise DatabaseUnavailable; those that write also CommitUnknown."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def get(self, tenant: str) -> Account:
        """Return the account of a tenant.  Raises NotFound."""
        with self.database.read() as connection:
            row = _find(connection, tenant)
            if row is None:
                raise _no_account(tenant)
            return _account(row, credits.read_balance(connection, tenant))

    def list_all(self) -> list[Account]:
        """Return all accounts, by tenant."""
        with self.database.read() as connection:
            rows = connection.execute(select(credit_accounts).order_by(credit_accounts.c.tenant)).all()
            balances = credits.read_balances(connection) if rows else {}
        return [_account(row, balances.get(row.tenant, Balance())) for row in rows]

    def list_transfers(self, account: Account, before: int | None, limit: int) -> Sequence[Row]:
        """Return the newest transfers of an account.  before: the id of the last one of the page before."""
        return credits.list_transfers(self.database, account.tenant, before, limit, account.after_transfer)

    # -- accounts --------------------------------------------------------------------------------------------

    def open(self, tenant: str, overdraft: int, low_mark: int | None, now_ms: int) -> None:
        """Let a tenant's jobs cost something from now on, or change its account.  Raises NotFound: no such tenant."""
        values = {"overdraft": overdraft, "low_mark": low_mark, "low_since_ms": None, "closed_ms": None}

        def unit(tx: Transaction) -> bool | NotFound:
            is_added = tx.connection.execute(select(tenants.c.name).where(tenants.c.name == tenant)).first()
            if is_added is None and tenant != LOCAL_IDENTITY.tenant.name:
                return NotFound(f"There is no tenant {tenant!r}.", tenant=tenant)
            catalog_changes.raise_version(tx, Change(Part.TENANT, tenant))
            if _find(tx.connection, tenant) is None:
                last = select(func.max(transfers.c.id)).where(transfers.c.tenant == tenant)
                new = {
                    "opened_ms": now_ms,
                    "after_transfer": tx.connection.execute(last).scalar() or 0,
                    "spent_before": credits.balance_in(tx, tenant).spent,
                }
                tx.connection.execute(insert(credit_accounts), {"tenant": tenant, **values, **new})
            else:
                of_tenant = credit_accounts.c.tenant == tenant
                tx.connection.execute(update(credit_accounts).where(of_tenant).values(**values))
            return True

        entry = make_entry("credit.open", now_ms=now_ms, tenant=tenant, overdraft=overdraft, low_mark=low_mark)
        commit_audited(self.database, entry, unit)

    def close(self, tenant: str, now_ms: int) -> None:
        """Let a tenant's jobs that are accepted from now on cost nothing.

        Jobs that hold credits are settled at their end.  Raises NotFound.
        """

        def unit(tx: Transaction) -> bool | NotFound:
            if _find(tx.connection, tenant) is None:
                return _no_account(tenant)
            catalog_changes.raise_version(tx, Change(Part.TENANT, tenant))
            closed = {"closed_ms": func.coalesce(credit_accounts.c.closed_ms, now_ms)}
            tx.connection.execute(update(credit_accounts).where(credit_accounts.c.tenant == tenant).values(**closed))
            return True

        commit_audited(self.database, make_entry("credit.close", now_ms=now_ms, tenant=tenant), unit)

    def act(self, tenant: str, act: Act, now_ms: int) -> tuple[Row, bool]:
        """Do an act once, and return its transfer, and whether it was done now.

        Raises NotFound: no account, or no such job; Conflict: more than is available, or than the job has cost;
        IdempotencyConflict: the reference came with another act.
        """
        entry = make_entry(
            f"credit.{act.kind}",
            job_id=act.job_id or "",
            now_ms=now_ms,
            reason=act.reason,
            tenant=tenant,
            amount=act.amount,
        )

        actor = get_actor().name  # The transaction may run in another thread.

        def unit(tx: Transaction) -> bool | NotFound | Conflict:
            account = _find(tx.connection, tenant)
            if account is None:
                return _no_account(tenant)
            if (known := _find_act(tx.connection, account, act)) is not None:
                return False if _is_same(known, act) else _other_act()
            found = _check(tx, account, act)
            if isinstance(found, NotFound | Conflict):
                return found
            about = {
                **found,
                "why": storable_text(act.reason, _MAX_REASON),
                "actor": actor,
                "reference": _reference(account, act),
            }
            amount = about.pop("amount")
            credits.move_by_operator(tx, tenant, act.kind, amount, now_ms, about)
            return True

        is_new = commit_audited(self.database, entry, unit)
        with self.database.read() as connection:
            return _find_act(connection, _find(connection, tenant), act), is_new

    # -- maintenance -----------------------------------------------------------------------------------------

    def note_low(self, now_ms: int) -> None:
        """Write the event credit.low for each account that has less available than its low mark, once each time."""
        for account in self.list_all():
            if account.low_mark is not None and account.closed_ms is None:
                self._note_low(account, account.available < account.low_mark, now_ms)

    def _note_low(self, account: Account, is_low: bool, now_ms: int) -> None:
        if is_low == (account.low_since_ms is not None):
            return
        as_read = (credit_accounts.c.tenant == account.tenant) & (
            credit_accounts.c.low_since_ms.is_(None) if is_low else credit_accounts.c.low_since_ms.is_not(None)
        )
        changed = update(credit_accounts).where(as_read).values(low_since_ms=now_ms if is_low else None)

        def unit(tx: Transaction) -> None:
            if tx.connection.execute(changed).rowcount and is_low:
                data = {"tenant": account.tenant, "available": account.available, "low_mark": account.low_mark}
                events.add_event(tx, f"tenant/{account.tenant}", LOW_TYPE, now_ms, data, tenant=account.tenant)

        self.database.write(unit)


def remove_account(tx: Transaction, tenant: str, now_ms: int) -> None:
    """Remove a tenant's account, and withdraw what it has left, in the transaction that removes the tenant.

    Raises Conflict: its jobs hold credits.
    """
    if _find(tx.connection, tenant) is None:
        return
    _check_unheld(tx, tenant)
    tx.check_locked(credits.lock_of(tenant), _check_unheld, tenant)
    if available := credits.balance_in(tx, tenant).available:
        kind = "withdraw" if available > 0 else "grant"
        credits.move_by_operator(tx, tenant, kind, abs(available), now_ms, {"why": "tenant removed"})
    tx.connection.execute(delete(credit_accounts).where(credit_accounts.c.tenant == tenant))


def _check_unheld(tx: Transaction, tenant: str) -> None:
    if held := credits.balance_in(tx, tenant).held:
        raise Conflict(
            f"Jobs of tenant {tenant!r} hold {format_credits(held)} credits; cancel them, or wait until they have "
            "ended.",
            tenant=tenant,
        )


def _reference(account: Row, act: Act) -> str:
    """Return what identifies an act: a later tenant of this name may use the same key."""
    return f"{account.opened_ms} {act.reference}"


def _find_act(connection: Connection, account: Row, act: Act) -> Row | None:
    done = (transfers.c.tenant == account.tenant) & (transfers.c.reference == _reference(account, act))
    return connection.execute(select(transfers).where(done)).first()


def _check(tx: Transaction, account: Row, act: Act) -> dict[str, Any] | NotFound | Conflict:
    """Return the columns of an act's transfer, or why it is refused."""
    if act.kind == "refund":
        return _check_refund(tx, account, act)
    tenant, amount = account.tenant, act.amount or 0
    available = credits.balance_in(tx, tenant).available
    if act.kind == "withdraw" and amount > available:
        return Conflict(
            f"Tenant {tenant!r} has {format_credits(available)} credits available; withdraw that at most.",
            tenant=tenant,
            available=available,
        )
    return {"amount": amount}


def _check_refund(tx: Transaction, account: Row, act: Act) -> dict[str, Any] | NotFound | Conflict:
    tenant = account.tenant
    of_job = select(jobs.c.seq, jobs.c.model).where(jobs.c.id == act.job_id, jobs.c.tenant == tenant)
    job = tx.connection.execute(of_job).first()
    if job is None:
        return NotFound(
            f"Tenant {tenant!r} has no job {act.job_id!r}; grant it the credits instead.", job_id=act.job_id
        )
    of_account = (transfers.c.seq == job.seq, transfers.c.id > account.after_transfer)
    rows = tx.connection.execute(select(transfers).where(*of_account)).all()
    refunds = [row for row in rows if row.kind == "refund"]
    cost = sum(row.amount for row in rows if row.kind == "settle") - sum(row.amount for row in refunds)
    amount = cost if act.amount is None else act.amount
    if amount > cost or cost <= 0:
        return Conflict(
            f"Job {act.job_id!r} has cost {format_credits(cost)} credits, without what was refunded; refund that at "
            "most.",
            job_id=act.job_id,
            cost=cost,
        )
    return {"amount": amount, "seq": job.seq, "job_id": act.job_id, "model": job.model, "number": len(refunds)}


def _is_same(known: Row, act: Act) -> bool:
    is_amount = act.amount is None or known.amount == act.amount
    return bool(known.kind == act.kind and is_amount and known.job_id == act.job_id)


def _other_act() -> IdempotencyConflict:
    return IdempotencyConflict(
        "This Idempotency-Key came with another act before; send the same one again, or use a new key."
    )


def _find(connection: Connection, tenant: str) -> Row | None:
    return connection.execute(select(credit_accounts).where(credit_accounts.c.tenant == tenant)).first()


def _no_account(tenant: str) -> NotFound:
    return NotFound(f"Tenant {tenant!r} has no credit account: its jobs cost nothing.", tenant=tenant)


def _account(row: Row, balance: Balance) -> Account:
    return Account(
        row.tenant,
        row.overdraft,
        row.low_mark,
        row.low_since_ms,
        row.opened_ms,
        row.closed_ms,
        balance.available,
        balance.held,
        balance.spent - row.spent_before,
        row.after_transfer,
    )
