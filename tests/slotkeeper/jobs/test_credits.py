"""Credits: the hold of a job, the charge at its end, and the sums that always agree (CREDIT-1)."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import insert, update

from slotkeeper.db import Database, Write
from slotkeeper.db.compiled_sql import BulkInsert
from slotkeeper.errors import Conflict, InsufficientCredits
from slotkeeper.jobs import credits
from slotkeeper.jobs.credits import Balance
from slotkeeper.jobs.states import FINAL_STATES, TRANSITIONS, Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import balance_parts, jobs, transfers
from slotkeeper.jobs.values import JobError, Quarantine
from slotkeeper.outbox import retention
from slotkeeper.registry.credit_accounts import Account, Act, CreditAccounts
from slotkeeper.registry.identity import Tenant
from slotkeeper.registry.tenants import Tenants
from tests.support.builders import SECOND, T0, a_job, at_once, row_of, rows_in
from tests.support.ends import store_end
from tools.cluster.direct_starts import store_start

_ERROR = JobError("model_error", "out of memory")
_HELD, _PRICE = 600, 10
"""What each job holds, and what a second of its slot costs."""


@pytest.fixture
def accounts(database: Database) -> Iterator[CreditAccounts]:
    Tenants(database).add(Tenant("acme"), T0)
    CreditAccounts(database).open("acme", 0, None, T0)
    yield CreditAccounts(database)
    assert credits.find_unbalanced(database, with_transfers=True) == {}


def _grant(accounts: CreditAccounts, amount: int, tenant: str = "acme") -> None:
    reference = f"grant {rows_in(accounts.database, transfers)}"
    accounts.act(tenant, Act("grant", amount, "paid", reference), T0)


def _a_paid_job(**changes: Any) -> Any:
    return a_job(**{"tenant": "acme", "reserved": _HELD, "price": _PRICE} | changes)


def _transfers(accounts: CreditAccounts) -> Sequence[Any]:
    return accounts.list_transfers(accounts.get("acme"), None, 100)


def _carry(database: Database, before_ms: int) -> None:
    after: int | None = 0
    while after is not None:
        after = credits.carry_old(database, before_ms, after, 2)


def _balance(accounts: CreditAccounts, tenant: str = "acme") -> Balance:
    account = accounts.get(tenant)
    return Balance(account.available, account.held, account.spent)


def _start(store: JobStore, job_id: str, at_ms: int = T0, price: int | None = None) -> int:
    run = store_start(store, job_id, "gpu1", "gpu1-slot0", "lease", at_ms, price=price)
    assert run is not None
    return run.attempt


# -- what a job holds ----------------------------------------------------------------------------------------------


def test_a_job_holds_credits_until_its_end_charges_the_time_of_its_slot(store, accounts):
    _grant(accounts, 1000)
    job = _a_paid_job()
    store.submit([job], T0)
    assert _balance(accounts) == (400, 600, 0)
    attempt = _start(store, job.id)
    ended_ms = T0 + 7 * SECOND + 999
    assert store_end(store, job.id, attempt, Reason.FINISHED, ended_ms, result="1", run_ended_ms=ended_ms)
    assert _balance(accounts) == (1000 - 79, 0, 79)
    assert row_of(store.database, job.id)["reserved"] == -_HELD
    kinds = [(row.kind, row.amount, row.slot_ms) for row in credits.list_of_job(store.database, 1)]
    assert kinds == [("reserve", 600, None), ("settle", 79, 7999)]


def test_a_job_that_costs_more_than_its_hold_is_charged_and_the_balance_may_fall_below_0(store, accounts):
    _grant(accounts, 600)
    job = _a_paid_job()
    store.submit([job], T0)
    ended_ms = T0 + 100 * SECOND
    attempt = _start(store, job.id)
    assert store_end(store, job.id, attempt, Reason.FINISHED, ended_ms, result="1", run_ended_ms=ended_ms)
    assert _balance(accounts) == (-400, 0, 1000)
    with pytest.raises(InsufficientCredits) as refused:
        store.submit([_a_paid_job()], T0)
    assert refused.value.facts == {"tenant": "acme", "available": -400, "needed": 600}


def test_too_few_credits_refuse_all_jobs_of_a_submit_and_store_nothing(store, accounts):
    _grant(accounts, 1199)
    with pytest.raises(InsufficientCredits, match=r"has 0\.001199 credits available, and this needs 0\.0012 reserved"):
        store.submit([_a_paid_job(), _a_paid_job()], T0)
    assert rows_in(store.database, jobs) == 0 and _balance(accounts) == (1199, 0, 0)
    store.submit([_a_paid_job()], T0)
    assert _balance(accounts) == (599, 600, 0)


def test_an_overdraft_allows_a_reservation_to_lower_the_balance_below_0(store, accounts):
    accounts.open("acme", 600, None, T0)
    store.submit([_a_paid_job()], T0)
    with pytest.raises(InsufficientCredits, match=r"and may go 0\.0006 below 0"):
        store.submit([_a_paid_job()], T0)


def test_a_refusal_for_credits_disturbs_no_other_write_of_its_group(store, accounts):
    _grant(accounts, 600)
    good, short, free = _a_paid_job(), _a_paid_job(), a_job()
    results = store.database.commit_all([store.submit_write([one], T0) for one in (good, short, free)])
    assert [isinstance(result, InsufficientCredits) for result in results] == [False, True, False]
    assert [store.get_state(job.id) for job in (good, short, free)] == [State.QUEUED, None, State.QUEUED]
    assert _balance(accounts) == (0, 600, 0)


def test_a_repeated_submit_reserves_no_further_credits(store, accounts):
    _grant(accounts, 600)
    keyed = _a_paid_job(idempotency_key="k", fingerprint="f")
    store.submit([keyed], T0)
    again = store.submit([keyed], T0)
    with_its_key = store.submit([_a_paid_job(idempotency_key="k", fingerprint="f")], T0)
    assert again[0].deduplicated and with_its_key[0].id == keyed.id
    assert _balance(accounts) == (0, 600, 0)


def test_a_key_whose_job_was_deleted_pays_again(store, accounts):
    _grant(accounts, 600)
    first = _a_paid_job(idempotency_key="k", fingerprint="f")
    store.submit([first], T0)
    store_end(store, first.id, _start(store, first.id), Reason.RETRIES_EXHAUSTED, T0, error=_ERROR)
    assert retention.delete_dead_job(store.database, first.id)
    accounts.act("acme", Act("withdraw", 600, "", "w"), T0)
    with pytest.raises(InsufficientCredits):
        store.submit([_a_paid_job(idempotency_key="k", fingerprint="f")], T0)


def test_a_job_that_is_deduplicated_within_a_submit_holds_credits_once(store, accounts):
    _grant(accounts, 600)
    twice = [_a_paid_job(idempotency_key="k", fingerprint="f") for _ in range(2)]
    assert [one.deduplicated for one in store.submit(twice, T0)] == [False, True]
    assert _balance(accounts) == (0, 600, 0)


def test_acts_and_submits_of_one_group_see_each_other(database, store, accounts):
    _grant(accounts, 1000)
    withdrawals = [Act("withdraw", 700, "", f"w{n}") for n in range(3)]
    results = at_once(*[lambda act=act: accounts.act("acme", act, T0) for act in withdrawals])
    assert sorted(isinstance(result, Conflict) for result in results) == [False, True, True]
    assert _balance(accounts) == (300, 0, 0)
    same = at_once(*[lambda: accounts.act("acme", Act("grant", 5, "", "same"), T0) for _ in range(4)])
    assert sorted(is_new for _, is_new in same) == [False, False, False, True]


def test_a_tenant_that_was_removed_in_the_same_group_has_no_job(database, store, accounts):
    _grant(accounts, 10_000)
    removed = at_once(
        lambda: Tenants(database).remove("acme"), *[lambda: store.submit([_a_paid_job()], T0) for _ in range(4)]
    )
    with database.read() as connection:
        balance = credits.read_balance(connection, "acme")
    assert (balance == (0, 0, 0)) == (removed[0] is None)
    for result in removed[1:]:
        assert removed[0] is None or not isinstance(result, Exception)


def test_an_account_that_is_closed_refuses_nothing_and_settles_what_is_held(store, accounts):
    _grant(accounts, 600)
    job = _a_paid_job()
    store.submit([job], T0)
    accounts.close("acme", T0)
    store.submit([_a_paid_job()], T0)  # by a process with the catalog before
    assert _balance(accounts) == (-600, 1200, 0)
    attempt = _start(store, job.id)
    store_end(store, job.id, attempt, Reason.FINISHED, T0 + SECOND, result="1", run_ended_ms=T0 + SECOND)
    assert _balance(accounts) == (-10, 600, 10)


def test_a_tenant_cannot_reserve_more_than_it_has(database, accounts):
    _grant(accounts, 10 * _HELD)
    with closing(Database(database.url)) as second, closing(Database(database.url)) as third:
        stores = [JobStore(one) for one in (database, second, third)]
        results = at_once(*[lambda store=store: store.submit([_a_paid_job()], T0) for store in stores * 8])
    assert sum(isinstance(result, InsufficientCredits) for result in results) == 14
    assert _balance(accounts) == (0, 10 * _HELD, 0)


def test_tenants_in_opposite_order_do_not_deadlock(database, accounts):
    Tenants(database).add(Tenant("beta"), T0)
    accounts.open("beta", 0, None, T0)
    for tenant in ("acme", "beta"):
        _grant(accounts, 100 * _HELD, tenant)

    def submit(store: JobStore, tenants: tuple[str, ...]) -> None:
        for _ in range(10):
            store.submit([_a_paid_job(tenant=tenant) for tenant in tenants], T0)

    with closing(Database(database.url)) as second:
        first_store, second_store = JobStore(database), JobStore(second)
        results = at_once(lambda: submit(first_store, ("acme", "beta")), lambda: submit(second_store, ("beta", "acme")))
        assert results == [None, None]
    assert _balance(accounts) == _balance(accounts, "beta") == (80 * _HELD, 20 * _HELD, 0)


# -- what an end costs ---------------------------------------------------------------------------------------------

_RAN_MS = 7 * SECOND
_CHARGED = {Reason.FINISHED, Reason.INVALID_REQUEST, Reason.DEADLINE_PASSED, Reason.CANCEL_REQUESTED}


@pytest.mark.parametrize(
    "why",
    sorted(why for (state, why), edge in TRANSITIONS.items() if state is State.RUNNING and edge.to in FINAL_STATES),
)
def test_a_run_that_ends_through_no_fault_of_the_customer_costs_nothing(store, accounts, why):
    _grant(accounts, 1000)
    job = _a_paid_job(deadline_ms=T0 + 60 * SECOND)
    store.submit([job], T0)
    attempt, ended_ms = _start(store, job.id), T0 + _RAN_MS
    ends: dict[str, Any] = {"result": "1"} if why is Reason.FINISHED else {"error": _ERROR}
    assert store_end(store, job.id, attempt, why, T0 + 50 * SECOND, run_ended_ms=ended_ms, **ends)
    assert _balance(accounts) == ((930, 0, 70) if why in _CHARGED else (1000, 0, 0))


def test_only_the_last_run_of_a_job_is_charged(store, accounts):
    _grant(accounts, 1000)
    job = _a_paid_job()
    store.submit([job], T0)
    at_ms = T0
    for why in (Reason.SERVER_BUSY, Reason.SERVER_LOST, Reason.HANDED_BACK, Reason.LEASE_EXPIRED):
        attempt, at_ms = _start(store, job.id, at_ms), at_ms + 100 * SECOND
        assert store_end(store, job.id, attempt, why, at_ms, error=_ERROR)
    attempt = _start(store, job.id, at_ms)
    assert store_end(store, job.id, attempt, Reason.FINISHED, at_ms + SECOND, result="1", run_ended_ms=at_ms + SECOND)
    assert _balance(accounts) == (990, 0, 10)


def test_a_failed_run_of_a_job_with_a_cancel_request_costs_nothing(store, accounts):
    _grant(accounts, 1000)
    job = _a_paid_job()
    store.submit([job], T0)
    attempt, at_ms = _start(store, job.id), T0 + 9 * SECOND
    store.request_cancel(job.id, T0)
    ended = store_end(store, job.id, attempt, Reason.SERVER_BUSY, at_ms, error=_ERROR, run_ended_ms=at_ms)
    assert ended is not None and ended.to is State.CANCELED
    assert _balance(accounts) == (1000, 0, 0)


def test_a_job_that_ends_before_it_starts_costs_nothing(store, accounts):
    _grant(accounts, 2000)
    canceled, expired = _a_paid_job(), _a_paid_job(deadline_ms=T0 + SECOND)
    store.submit([canceled, expired], T0)
    store.cancel_waiting(canceled.id, T0 + 9 * SECOND)
    store.expire_overdue(T0 + 9 * SECOND)
    assert _balance(accounts) == (2000, 0, 0)


def test_a_run_that_its_deadline_ended_is_charged_until_the_deadline(store, accounts):
    _grant(accounts, 1000)
    job = _a_paid_job(deadline_ms=T0 + 5 * SECOND)
    store.submit([job], T0)
    _start(store, job.id)
    store.expire_overdue(T0 + 6 * SECOND, quarantine=Quarantine("deadline_passed", T0 + 90 * SECOND))
    assert _balance(accounts) == (950, 0, 50)


def test_a_run_whose_passed_deadline_is_found_late_costs_nothing(store, accounts):
    _grant(accounts, 1000)
    job = _a_paid_job(deadline_ms=T0 + 5 * SECOND)
    store.submit([job], T0)
    _start(store, job.id)
    store.expire_overdue(T0 + 60 * SECOND)
    assert _balance(accounts) == (1000, 0, 0)


def test_a_run_that_only_waited_for_an_earlier_request_costs_nothing(store, accounts):
    _grant(accounts, 1000)
    job = _a_paid_job()
    store.submit([job], T0)
    lost = _start(store, job.id)
    assert store_end(store, job.id, lost, Reason.LEASE_EXPIRED, T0 + SECOND, error=_ERROR)
    attempt, at_ms = _start(store, job.id, T0 + 2 * SECOND), T0 + 9 * SECOND
    assert row_of(store.database, job.id)["sent_ms"] < T0 + 2 * SECOND
    assert store_end(store, job.id, attempt, Reason.CANCEL_REQUESTED, at_ms, error=_ERROR, run_ended_ms=at_ms)
    assert _balance(accounts) == (1000, 0, 0)


def test_a_resumed_run_is_charged_from_when_its_request_was_sent_again(store, accounts):
    _grant(accounts, 1000)
    job = _a_paid_job()
    store.submit([job], T0)
    attempt = _start(store, job.id)
    store.database.commit(store.sent_write(job.id, attempt, T0 + 4 * SECOND))
    at_ms = T0 + 6 * SECOND
    assert store_end(store, job.id, attempt, Reason.FINISHED, at_ms, result="1", run_ended_ms=at_ms)
    assert _balance(accounts) == (980, 0, 20)


def test_an_outage_of_the_database_is_not_charged(store, accounts):
    _grant(accounts, 1000)
    job = _a_paid_job()
    store.submit([job], T0)
    attempt = _start(store, job.id)
    late_ms, answered_ms = T0 + 3600 * SECOND, T0 + SECOND
    assert store_end(store, job.id, attempt, Reason.FINISHED, late_ms, result="1", run_ended_ms=answered_ms)
    assert _balance(accounts) == (990, 0, 10)


def test_a_clock_that_was_set_back_charges_nothing(store, accounts):
    _grant(accounts, 1000)
    job = _a_paid_job()
    store.submit([job], T0)
    attempt = _start(store, job.id)
    assert store_end(store, job.id, attempt, Reason.FINISHED, T0, result="1", run_ended_ms=T0 - SECOND)
    assert _balance(accounts) == (1000, 0, 0)


def test_a_start_lowers_the_price_to_that_of_its_server_and_never_raises_it(store, accounts):
    _grant(accounts, 1000)
    for price, cost in ((4, 4), (40, 10), (None, 10), (0, 0)):
        job = _a_paid_job()
        store.submit([job], T0)
        attempt = _start(store, job.id, price=price)
        before = _balance(accounts)
        at_ms = T0 + SECOND
        assert store_end(store, job.id, attempt, Reason.FINISHED, at_ms, result="1", run_ended_ms=at_ms)
        assert _balance(accounts).spent == before.spent + cost
    free = a_job()
    store.submit([free], T0)
    _start(store, free.id, price=4)
    assert row_of(store.database, free.id)["price"] is None


def test_an_end_that_is_stored_again_after_a_lost_answer_is_charged_once(store, accounts):
    _grant(accounts, 1000)
    job = _a_paid_job()
    store.submit([job], T0)
    attempt, at_ms = _start(store, job.id), T0 + SECOND
    write: Write[Any] = store.settle_write(job.id, attempt, Reason.FINISHED, at_ms, result="1", run_ended_ms=at_ms)
    assert store.database.commit(write) == store.database.commit(write)
    assert _balance(accounts) == (990, 0, 10)


# -- revive --------------------------------------------------------------------------------------------------------


def test_a_revived_job_holds_its_credits_again(store, accounts):
    _grant(accounts, 600)
    job = _a_paid_job()
    store.submit([job], T0)
    attempt = _start(store, job.id)
    store_end(store, job.id, attempt, Reason.RETRIES_EXHAUSTED, T0, error=_ERROR)
    assert _balance(accounts) == (600, 0, 0)
    assert store.revive(job.id, T0) is not None
    assert _balance(accounts) == (0, 600, 0)
    store.cancel_waiting(job.id, T0)
    assert _balance(accounts) == (600, 0, 0)
    assert [row.kind for row in credits.list_of_job(store.database, 1)] == ["reserve", "settle"] * 2


def test_a_job_is_not_revived_without_credits(store, accounts):
    _grant(accounts, 600)
    job = _a_paid_job()
    store.submit([job], T0)
    store_end(store, job.id, _start(store, job.id), Reason.RETRIES_EXHAUSTED, T0, error=_ERROR)
    accounts.act("acme", Act("withdraw", 1, "back", "w"), T0)
    with pytest.raises(InsufficientCredits):
        store.revive(job.id, T0)
    assert store.get_state(job.id) is State.DEAD and _balance(accounts) == (599, 0, 0)


def test_a_job_that_reuses_the_id_of_a_deleted_job_is_charged_separately(store, accounts):
    _grant(accounts, 2000)
    for _ in range(2):
        job = _a_paid_job(id="chosen")
        store.submit([job], T0)
        at_ms = T0 + SECOND
        attempt = _start(store, job.id)
        assert store_end(store, job.id, attempt, Reason.FINISHED, at_ms, result="1", run_ended_ms=at_ms)
        assert retention.delete_ended_jobs(store.database, T0 + 2 * SECOND, 10) == 1
    assert _balance(accounts) == (1980, 0, 20)


def test_a_job_revived_after_its_account_was_closed_costs_nothing(store, accounts):
    _grant(accounts, 600)
    job = _a_paid_job()
    store.submit([job], T0)
    store_end(store, job.id, _start(store, job.id), Reason.RETRIES_EXHAUSTED, T0, error=_ERROR)
    accounts.close("acme", T0)
    accounts.act("acme", Act("withdraw", 600, "", "w"), T0)
    assert store.revive(job.id, T0) is not None
    assert row_of(store.database, job.id)["reserved"] is None
    at_ms = T0 + SECOND
    assert store_end(store, job.id, _start(store, job.id), Reason.FINISHED, at_ms, result="1", run_ended_ms=at_ms)
    assert _balance(accounts) == (0, 0, 0)


# -- balances ------------------------------------------------------------------------------------------------------


def test_parts_are_folded_by_the_next_reservation_and_by_maintenance(store, accounts, monkeypatch):
    monkeypatch.setattr(credits, "MOST_PARTS", 5)
    _grant(accounts, 100 * _HELD)
    most = 0
    for _ in range(20):
        store.submit([_a_paid_job()], T0)
        most = max(most, rows_in(store.database, balance_parts))
    assert most <= 7
    assert _balance(accounts) == (80 * _HELD, 20 * _HELD, 0)
    monkeypatch.setattr(credits, "MOST_PARTS", 1)
    assert credits.fold_all(store.database) == 1
    assert rows_in(store.database, balance_parts) == 1 and credits.fold_all(store.database) == 0
    assert _balance(accounts) == (80 * _HELD, 20 * _HELD, 0)


def test_parts_of_one_transaction_are_one_row(store, accounts):
    _grant(accounts, 10 * _HELD)
    store.submit([_a_paid_job() for _ in range(10)], T0)
    assert rows_in(store.database, balance_parts) == 2 and _balance(accounts) == (0, 10 * _HELD, 0)


def test_old_transfers_are_added_up_by_kind(store, accounts):
    _grant(accounts, 10 * _HELD)
    for _ in range(4):
        job = _a_paid_job()
        store.submit([job], T0)
        attempt = _start(store, job.id)
        store_end(store, job.id, attempt, Reason.FINISHED, T0 + SECOND, result="1", run_ended_ms=T0 + SECOND)
    _carry(store.database, T0 + 2 * SECOND)
    assert len(_transfers(accounts)) == 4 * 2 + 1, "those of jobs that are stored stay"
    assert retention.delete_ended_jobs(store.database, T0 + 2 * SECOND, 3) == 3
    for before_ms in (T0, T0 + 2 * SECOND, T0 + 2 * SECOND):
        _carry(store.database, before_ms)
    left = _transfers(accounts)
    kinds = [("settle", 0), ("reserve", 0), ("settle", 1), ("reserve", 1), ("grant", 1)]
    assert [(row.kind, row.carried) for row in left] == kinds
    assert (left[2].amount, left[2].reserved, left[2].slot_ms) == (30, 3 * _HELD, 3 * SECOND)
    assert _balance(accounts) == (10 * _HELD - 40, 0, 40)
    assert retention.delete_ended_jobs(store.database, T0 + 2 * SECOND, 3) == 1
    _carry(store.database, T0 + 2 * SECOND)
    assert [(row.kind, row.amount) for row in _transfers(accounts)] == [
        ("settle", 40),
        ("reserve", 4 * _HELD),
        ("grant", 10 * _HELD),
    ]


def test_the_transfers_of_an_earlier_tenant_of_the_same_name_are_carried_separately(database, accounts):
    _grant(accounts, 1000)
    Tenants(database).remove("acme")
    Tenants(database).add(Tenant("acme"), T0)
    accounts.open("acme", 0, None, T0 + 1)
    later = accounts.act("acme", Act("grant", 7, "", "grant 0"), T0 + 1)
    assert later[1], "the earlier tenant has used the same key"
    for _ in range(2):
        _carry(database, T0 + 10**12)
        assert [(row.kind, row.amount) for row in _transfers(accounts)] == [("grant", 7)]
    assert rows_in(database, transfers) == 3 and _balance(accounts) == (7, 0, 0)


@pytest.mark.parametrize(
    ("change", "with_transfers"),
    [
        (insert(balance_parts).values(tenant="acme", available=0, held=1, spent=-1), False),
        (update(jobs).values(reserved=5), False),
        (update(jobs).values(state="completed"), False),
        (insert(balance_parts).values(tenant="acme", available=1, held=0, spent=-1), True),
        (insert(transfers).values(tenant="acme", kind="grant", amount=1, at_ms=T0), True),
    ],
)
def test_credit_1_what_was_changed_behind_our_back_is_found(store, accounts, change, with_transfers):
    _grant(accounts, 1000)
    store.submit([_a_paid_job()], T0)
    assert credits.find_unbalanced(store.database, with_transfers=True) == {}
    with store.database.engine.begin() as connection:
        connection.execute(change)
    assert list(credits.find_unbalanced(store.database, with_transfers=with_transfers)) == ["acme"]
    with store.database.engine.begin() as connection:
        for table in (balance_parts, transfers, jobs):
            connection.execute(table.delete())


def test_sums_of_a_transaction_are_inserted_once(database):
    into = BulkInsert(balance_parts)

    def unit(tx: Any) -> None:
        assert tx.added_up(into, {"tenant": "a"}) is None
        for tenant in ("a", "b", "a"):
            tx.add_up(into, {"tenant": tenant}, {"available": 1, "held": 2, "spent": 3})
        assert tx.added_up(into, {"tenant": "a"})["held"] == 4

    database.write(unit)
    with database.read() as connection:
        assert credits.read_balance(connection, "a") == (2, 4, 6)
    assert rows_in(database, balance_parts) == 2


# -- random histories ----------------------------------------------------------------------------------------------

_WORDS = """
    grant submit submit start start finish fail busy lose die revive cancel expire fold carry withdraw refund
"""
_ACTS = st.tuples(st.sampled_from(_WORDS.split()), st.integers(0, 20))


class _History:
    """One tenant's jobs, with a second account of what they should have cost."""

    def __init__(self, database: Database, tenant: str) -> None:
        self.store, self.accounts, self.tenant = JobStore(database), CreditAccounts(database), tenant
        self.now_ms, self.number = T0, 0
        self.granted = self.charged = 0
        Tenants(database).add(Tenant(tenant), T0)
        self.accounts.open(tenant, 0, None, T0)

    def act(self, what: str, n: int) -> None:
        self.now_ms += 700
        self.number += 1
        getattr(self, f"_{what}", lambda n: self._end(what, n))(n)

    def check(self) -> None:
        assert credits.find_unbalanced(self.store.database, with_transfers=True) == {}
        account: Account = self.accounts.get(self.tenant)
        assert account.spent == self.charged and account.available + account.held + account.spent == self.granted
        held = [job.reserved for job in self._jobs() if job.state not in FINAL_STATES]
        assert account.held == sum(amount or 0 for amount in held)

    def _jobs(self, *states: State) -> list[Any]:
        with self.store.database.read() as connection:
            ids = connection.execute(jobs.select().where(jobs.c.tenant == self.tenant)).all()
        found = [self.store.get(row.id) for row in ids]
        return [job for job in found if job is not None and (not states or job.state in states)]

    def _pick(self, n: int, *states: State) -> Any:
        found = self._jobs(*states)
        return found[n % len(found)] if found else None

    def _grant(self, n: int) -> None:
        self.accounts.act(self.tenant, Act("grant", 100 * n, "", str(self.number)), self.now_ms)
        self.granted += 100 * n

    def _withdraw(self, n: int) -> None:
        if self.accounts.get(self.tenant).available >= n:
            self.accounts.act(self.tenant, Act("withdraw", n, "", str(self.number)), self.now_ms)
            self.granted -= n

    def _refund(self, n: int) -> None:
        job = self._pick(n, State.COMPLETED)
        cost = 0 if job is None else self._cost_of(job)
        if cost:
            amount = min(n, cost) or None
            self.accounts.act(self.tenant, Act("refund", amount, "", str(self.number), job.id), self.now_ms)
            self.charged -= cost if amount is None else amount

    def _cost_of(self, job: Any) -> int:
        rows = credits.list_of_job(self.store.database, job.seq)
        return sum(row.amount * {"settle": 1, "refund": -1}.get(row.kind, 0) for row in rows)

    def _submit(self, n: int) -> None:
        new = [
            _a_paid_job(tenant=self.tenant, reserved=50 * n + 1, deadline_ms=self.now_ms + 5000)
            for _ in range(1 + n % 2)
        ]
        try:
            self.store.submit(new, self.now_ms)
        except InsufficientCredits:
            assert self.accounts.get(self.tenant).available < sum(job.reserved for job in new)

    def _start(self, n: int) -> None:
        job = self._pick(n, State.QUEUED)
        if job is not None:
            store_start(self.store, job.id, "gpu1", f"s{self.number}", "lease", self.now_ms, price=n)

    def _end(self, what: str, n: int) -> None:
        whys = {
            "finish": Reason.FINISHED,
            "fail": Reason.INVALID_REQUEST,
            "busy": Reason.SERVER_BUSY,
            "lose": Reason.LEASE_EXPIRED,
            "die": Reason.RETRIES_EXHAUSTED,
        }
        job, why = self._pick(n, State.RUNNING), whys[what]
        if job is not None:
            ends: dict[str, Any] = {"result": "1"} if what == "finish" else {"error": _ERROR}
            store_end(self.store, job.id, job.attempt, why, self.now_ms, run_ended_ms=self.now_ms, **ends)
            if what in ("finish", "fail"):
                self.charged += job.price * (self.now_ms - job.started_ms) // 1000

    def _revive(self, n: int) -> None:
        job = self._pick(n, State.DEAD)
        if job is not None and self.accounts.get(self.tenant).available >= abs(job.reserved):
            assert self.store.revive(job.id, self.now_ms)

    def _cancel(self, n: int) -> None:
        job = self._pick(n, State.QUEUED)
        if job is not None:
            self.store.cancel_waiting(job.id, self.now_ms)

    def _expire(self, n: int) -> None:
        for job in self._jobs(State.RUNNING):
            if job.deadline_ms is not None and 0 <= self.now_ms - job.deadline_ms <= 10_000:
                self.charged += job.price * max(job.deadline_ms - job.started_ms, 0) // 1000
        self.store.expire_overdue(self.now_ms)

    def _fold(self, n: int) -> None:
        self.store.database.write(lambda tx: credits.fold(tx, self.tenant))

    def _carry(self, n: int) -> None:
        if n % 2:
            retention.delete_ended_jobs(self.store.database, self.now_ms - 3000, 2)
        _carry(self.store.database, self.now_ms - 5000)


@given(st.lists(_ACTS, min_size=5, max_size=40))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_credit_1_holds_through_random_histories(database, history):
    tenant = f"t{rows_in(database, jobs)}-{rows_in(database, transfers)}-{len(Tenants(database).list_all())}"
    life = _History(database, tenant)
    life.act("grant", 20)
    for what, n in history:
        life.act(what, n)
        life.check()
