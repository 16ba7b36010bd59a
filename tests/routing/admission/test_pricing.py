"""What a job costs by the price list, and how much of it is charged when it ran through the whole dispatcher."""

from dataclasses import replace

import pytest

from routing.admission.pricing import MAX_RESERVED, price_at, with_cost
from routing.dispatch.outcome import OutcomeKind
from routing.maintenance import deadlines
from slotkeeper.errors import InsufficientCredits
from slotkeeper.jobs.states import State
from slotkeeper.jobs.terms import JobTerms
from slotkeeper.registry.credit_accounts import Act, CreditAccounts
from slotkeeper.registry.identity import Tenant
from slotkeeper.registry.prices import Price, set_prices
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.tenants import Tenants
from slotkeeper.registry.values import Server
from tests.support.builders import a_job
from tests.support.harness import Harness

_FREE_FLUX = Price("flux", "", 0, 60)
_H100 = Price("zimg", "gpu=H100", 50, 10)
_ZIMG = Price("zimg", "", 20, 60)
_ANY = Price(None, "", 1, 60)


def _catalog(*prices: Price, **attributes: str) -> CatalogSnapshot:
    server = Server("gpu", "zimg", 1, "online", {"zimg": "http://gpu", "flux": "http://gpu"}, 0, attributes)
    return CatalogSnapshot(1, {}, {"gpu": server}, prices=prices, metered=frozenset({"acme"}))


@pytest.mark.parametrize(
    ("prices", "model", "price", "reserved"),
    [
        ((), "zimg", None, None),
        ((_H100, _ZIMG, _ANY), "zimg", 50, 1200),
        ((_ZIMG, _H100, _ANY), "zimg", 20, 1200),  # The second never applies.
        ((_H100, _ANY), "flux", 1, 60),
        ((_FREE_FLUX, _ANY), "flux", None, None),
        ((_H100,), "flux", None, None),
    ],
)
def test_a_job_is_accepted_at_the_highest_price_that_may_apply(prices, model, price, reserved) -> None:
    job = with_cost(a_job(tenant="acme", model=model), _catalog(*prices))
    assert (job.price, job.reserved) == (price, reserved)


def test_a_longer_expected_output_holds_more_up_to_a_bound() -> None:
    for size, reserved in ((None, 1200), (1000, 1200), (2500, 3000), (10**7, 12_000_000)):
        terms = None if size is None else JobTerms(expected_output=size).encode()
        assert with_cost(a_job(tenant="acme", terms=terms), _catalog(_ZIMG)).reserved == reserved
    dear = replace(_ZIMG, per_slot_s=10**9, reserve_s=86_400)
    assert with_cost(a_job(tenant="acme"), _catalog(dear)).reserved == MAX_RESERVED


@pytest.mark.parametrize(
    ("attributes", "price"),
    [({"gpu": "H100"}, 50), ({"gpu": "A100"}, 20), ({}, 20), ({"gpu": "H100", "environment": "staging"}, 50)],
)
def test_the_first_row_that_fits_the_server_applies(attributes, price) -> None:
    assert price_at(_catalog(_H100, _ZIMG, **attributes), "zimg", "gpu") == price


def test_a_server_without_a_price_row_costs_nothing_and_a_removed_server_has_no_known_price() -> None:
    assert price_at(_catalog(_H100), "zimg", "gpu") == 0
    assert price_at(_catalog(), "zimg", "gpu") == 0
    assert price_at(_catalog(_ZIMG), "zimg", "gone") is None


# -- through the dispatcher ----------------------------------------------------------------------------------------


@pytest.fixture
def paying(harness: Harness) -> CreditAccounts:
    harness.register(2, max_retries=0)
    Tenants(harness.database).add(Tenant("acme"), harness.now)
    accounts = CreditAccounts(harness.database)
    accounts.open("acme", 0, None, harness.now)
    accounts.act("acme", Act("grant", 10_000, "paid", "g"), harness.now)
    set_prices(harness.database, [_ZIMG], harness.now)
    harness.dispatcher.catalog.refresh()
    return accounts


def _run(harness: Harness, ms: int, kind: OutcomeKind) -> State:
    job_id = harness.submit(tenant="acme")
    run = harness.start()
    harness.hold(run, ms)
    harness.settle(run, kind)
    return harness.state(job_id)


@pytest.mark.parametrize(
    ("kind", "state", "spent"),
    [
        (OutcomeKind.DONE, State.COMPLETED, 60),
        (OutcomeKind.FAILED, State.FAILED, 60),
        (OutcomeKind.RETRY, State.DEAD, 0),
    ],
)
def test_a_run_is_charged_by_its_measured_time(harness: Harness, paying: CreditAccounts, kind, state, spent) -> None:
    assert _run(harness, 3000, kind) is state
    account = paying.get("acme")
    assert (account.available, account.held, account.spent) == (10_000 - spent, 0, spent)


def test_a_canceled_run_is_charged_until_its_server_has_stopped_it(harness: Harness, paying: CreditAccounts) -> None:
    job_id = harness.submit(tenant="acme")
    run = harness.start()
    harness.dispatcher.cancel(job_id)
    harness.hold(run, 2000)
    harness.settle(run._replace(run=replace(run.run, cancel_requested=True)), OutcomeKind.CANCELED)
    assert harness.state(job_id) is State.CANCELED and paying.get("acme").spent == 40


def test_an_expired_run_is_charged_until_the_deadline(harness: Harness, paying: CreditAccounts) -> None:
    harness.submit(tenant="acme", ttl_s=5)
    run = harness.start()
    harness.hold(run, 9000)
    deadlines.expire_deadlines(harness.dispatcher)
    assert paying.get("acme").spent == 100


def test_a_submit_without_credits_is_refused_and_a_free_tenant_is_not(harness: Harness, paying: CreditAccounts) -> None:
    harness.submit_all([harness.a(tenant="acme") for _ in range(8)])
    with pytest.raises(InsufficientCredits, match=r"has 0\.0004 credits available, and this needs 0\.0012 reserved"):
        harness.submit(tenant="acme")
    assert harness.job(harness.submit(tenant="other")).reserved is None


def test_prices_and_accounts_are_read_by_change(harness: Harness, paying: CreditAccounts) -> None:
    catalog = harness.dispatcher.catalog
    assert catalog.get().metered == {"acme"} and list(catalog.get().prices) == [_ZIMG]
    paying.close("acme", harness.now)
    assert catalog.refresh().metered == frozenset()
    set_prices(harness.database, [], harness.now)
    assert list(catalog.refresh().prices) == []
