"""The limits on submits: each is a row, the first that refuses decides, and Redis is called once for all."""

from collections.abc import Sequence

import pytest
from redis.connection import AbstractConnection

from routing.admission import submit_limits
from routing.admission.submission import Submission, prepare_job
from routing.admission.submit_limits import Limit, Phase
from routing.admission.waiting_counts import FAR, FRESH_MS
from slotkeeper.errors import IdempotencyConflict, InvalidJob, TooManyRequests
from slotkeeper.registry.identity import LOCAL_IDENTITY, Identity, Tenant
from slotkeeper.registry.tenant_limits import INSTALLATION, RateLimit
from slotkeeper.registry.tenants import Tenants
from tests.support import limit_of_share
from tests.support.harness import Harness


@pytest.fixture
def trips(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was sent to Redis, an entry for each round trip."""
    sent: list[object] = []
    send = AbstractConnection.send_packed_command

    def noted(self: AbstractConnection, command: object, check_health: bool = True) -> None:
        sent.append(command)
        send(self, command, check_health)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", noted)
    return sent


def check(harness: Harness, asked: Sequence[Submission], sender: Identity = LOCAL_IDENTITY) -> None:
    """Apply the limits, and store nothing."""
    dispatcher = harness.dispatcher
    catalog = dispatcher.catalog.get()
    new = [prepare_job(one, catalog.resolve(one.request.model), lambda url: None, harness.now) for one in asked]
    dispatcher.admission.check(new, sender, catalog, harness.now)


# -- the table ---------------------------------------------------------------------------------------------------


def test_limits_are_listed_in_the_order_of_their_phases():
    """The limits that count a submit come last, so a refused submit does not use up the rate."""
    phases = [limit.phase.value for limit in submit_limits.LIMITS]
    assert phases == sorted(phases)


def test_a_limit_that_is_added_applies_to_every_submit(harness, monkeypatch):
    harness.register(1)
    for n in range(10):
        harness.submit(tenant=f"t{n}")
    harness.submit(tenant="t1")
    monkeypatch.setattr(
        submit_limits, "LIMITS", (*submit_limits.LIMITS[:-1], limit_of_share.LIMIT, submit_limits.LIMITS[-1])
    )
    harness.submit(tenant="t1")
    with pytest.raises(TooManyRequests, match="Half of the jobs") as refused:
        harness.submit_all([harness.a(tenant="t1") for _ in range(10)], Identity(Tenant("t1"), None, frozenset()))
    assert refused.value.retry_after_s == 5.0
    harness.submit(tenant="t2")


# -- one round trip --------------------------------------------------------------------------------------------------


def test_all_limits_on_counts_share_one_round_trip_and_the_rate_limit_needs_another(harness, trips, monkeypatch):
    for model in ("zimg", "flux"):
        harness.register(1, server=f"{model}-gpu", model=model, capacity=10)
    monkeypatch.setattr(
        submit_limits, "LIMITS", (*submit_limits.LIMITS[:-1], limit_of_share.LIMIT, submit_limits.LIMITS[-1])
    )
    asked = [
        harness.a("zimg", ttl_s=60.0),
        harness.a("zimg", constraints={"gpu": "A100"}),
        harness.a("flux", ttl_s=60.0),
    ]
    acme = harness.limited("acme", rate_per_s=1, burst=3)
    check(harness, asked, acme)  # scripts and catalog are known from now on
    harness.later(60_000)
    trips.clear()
    check(harness, asked, acme)
    assert len(trips) == 2
    trips.clear()
    check(harness, asked)
    assert len(trips) == 1


def test_a_limit_that_is_far_away_is_checked_in_redis_once_per_second(harness, trips):
    harness.register(1, max_waiting=2 * FAR)
    check(harness, [harness.a()])
    for later_ms, expected in ((FRESH_MS, 0), (1, 1), (0, 0)):
        harness.later(later_ms)
        trips.clear()
        check(harness, [harness.a()])
        assert len(trips) == expected


def test_local_limits_do_not_call_redis(harness, trips):
    harness.register(1)
    check(harness, [harness.a()])
    trips.clear()
    check(harness, [harness.a()])
    assert trips == []


# -- which refusal -----------------------------------------------------------------------------------------------------


def test_a_refused_submit_does_not_count_toward_the_rate_limit(harness):
    harness.register(1, max_waiting=0)
    acme = harness.limited("acme", rate_per_s=1, burst=3)
    harness.submit()
    for _ in range(5):
        with pytest.raises(TooManyRequests, match="configured to hold 0"):
            check(harness, [harness.a()], acme)
    harness.register(1, max_waiting=10)
    check(harness, [harness.a() for _ in range(3)], acme)
    with pytest.raises(TooManyRequests, match="slow down"):
        check(harness, [harness.a()], acme)


def test_only_free_slots_that_can_run_a_model_raise_the_limit_of_its_queued_jobs(harness):
    harness.register(1, server="shared", max_waiting=0)
    harness.register(1, server="shared", model="flux")
    harness.register(10, server="large", model="flux")
    fleet = harness.dispatcher.catalog.get().models["zimg"].fleet
    harness.redis.set(f"clock:{{{fleet}}}", harness.now)
    with pytest.raises(InvalidJob, match="2 jobs at once exceed the limit"):
        check(harness, [harness.a(), harness.a()])
    harness.submit()
    with pytest.raises(TooManyRequests, match="configured to hold 0"):
        check(harness, [harness.a()])
    check(harness, [harness.a("flux") for _ in range(10)])


def test_jobs_of_several_tenants_count_together_where_the_limit_is_of_the_model(harness):
    harness.register(1, max_waiting=5)
    harness.submit_all([harness.a() for _ in range(2)])
    with pytest.raises(InvalidJob, match="20 jobs at once exceed the limit"):
        check(harness, [harness.a(tenant=f"t{n}") for n in range(20)])
    check(harness, [harness.a(tenant=f"t{n}") for n in range(4)])


def test_the_first_limit_that_refuses_decides_even_if_a_later_limit_needs_no_redis(harness, monkeypatch):
    def refuse(request, context):
        raise InvalidJob("jobs", "never")

    harness.register(1, max_waiting=0)
    harness.submit()
    never = Limit("never", Phase.READ, refuse)
    monkeypatch.setattr(submit_limits, "LIMITS", (never, *submit_limits.LIMITS))
    with pytest.raises(InvalidJob, match="never"):
        check(harness, [harness.a()])
    monkeypatch.setattr(submit_limits, "LIMITS", (*submit_limits.LIMITS[1:], never))
    with pytest.raises(TooManyRequests, match="configured to hold 0"):
        check(harness, [harness.a()])


# -- what a tenant may submit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits, asked, field, remedy",
    [
        ({"models": ["flux"]}, {}, "model", "may submit jobs of these models: flux"),
        ({"models": []}, {}, "model", "these models: none"),
        ({"most_urgent": 4}, {"priority": 3}, "priority", "may use priorities 4 to 9; .*, or send 4"),
        ({"max_payload_bytes": 20}, {"payload": {"prompt": "é" * 10}}, "payload", "may have 20 bytes"),
    ],
)
def test_a_tenant_submits_what_it_may(harness, limits, asked, field, remedy):
    harness.register(1)
    harness.limited("acme", **limits)
    with pytest.raises(InvalidJob, match=remedy) as refused:
        check(harness, [harness.a(), harness.a(tenant="acme", **asked)])
    assert (refused.value.field, refused.value.facts["index"]) == (field, 1)
    check(harness, [harness.a(tenant="other", **asked)])


def test_a_job_runs_in_an_environment_of_its_tenant_and_in_the_first_if_it_names_none(harness):
    harness.register(1)
    harness.limited("acme", environments=["testnet", "production"])
    harness.limited("other")
    job_of = {
        name: harness.submit(tenant="acme", **named)
        for name, named in (
            ("none", {}),
            ("production", {"environment": "production"}),
            ("testnet", {"environment": "testnet"}),
        )
    }
    found = {name: harness.store.get(job_id).constraints for name, job_id in job_of.items()}
    assert found == {"none": "environment=testnet", "production": "", "testnet": "environment=testnet"}
    with pytest.raises(InvalidJob, match="'other' may run in these environments: production;") as refused:
        harness.submit(tenant="other", environment="testnet")
    assert refused.value.field == "environment"
    with pytest.raises(InvalidJob, match="these environments: testnet, production"):
        harness.submit(tenant="acme", environment="canary")


def test_a_repeated_submit_is_recognized_after_the_default_environment_has_changed(harness):
    harness.register(1)
    harness.limited("acme", environments=["testnet"])
    first = harness.submit(tenant="acme", id="one")
    harness.limited("acme", environments=["production"])
    assert harness.submit(tenant="acme", id="one") == first
    with pytest.raises(IdempotencyConflict, match="constraints"):
        harness.submit(tenant="acme", id="one", constraints={"gpu": "A100"})


def test_a_tenant_without_limits_has_the_limits_of_the_installation(harness):
    harness.register(1)
    harness.limited("acme", most_urgent=2)
    Tenants(harness.store.database).change(INSTALLATION, {"most_urgent": 4}, harness.now)
    harness.dispatcher.catalog.refresh()
    check(harness, [harness.a(tenant="acme", priority=2), harness.a(tenant="other", priority=4)])
    with pytest.raises(InvalidJob, match="'other' may use priorities 4 to 9"):
        check(harness, [harness.a(tenant="other", priority=3)])


def test_jobs_of_a_tenant_that_wait_are_counted_over_all_models_and_fleets(harness):
    for model in ("zimg", "flux"):
        harness.register(1, server=f"{model}-gpu", model=model)
    harness.limited("acme", max_waiting=3)
    for model in ("zimg", "flux", "zimg", "flux"):  # Two start at once.
        harness.submit(model, tenant="acme")
    harness.submit("zimg", tenant="other")
    check(harness, [harness.a("flux", tenant="acme")])
    with pytest.raises(TooManyRequests, match="2 jobs of tenant 'acme' wait, and 3 may"):
        check(harness, [harness.a("flux", tenant="acme"), harness.a("zimg", tenant="acme")])
    with pytest.raises(InvalidJob, match="split them"):
        check(harness, [harness.a(tenant="acme") for _ in range(4)])


def test_a_rate_of_a_key_and_one_of_a_model_count_beside_that_of_the_tenant(harness):
    harness.register(1)
    limits = {"rate_per_s": 100, "model_rates": {"zimg": {"rate_per_s": 1, "burst": 3}}}
    acme = harness.limited("acme", RateLimit(rate_per_s=1, burst=2), **limits)
    admission, catalog = harness.dispatcher.admission, harness.dispatcher.catalog.get()
    new = [prepare_job(harness.a(), catalog.resolve("zimg"), lambda url: None, harness.now)]
    left = admission.check(new, acme, catalog, harness.now)
    assert [(rate.name, rate.quota, rate.left) for rate in left] == [
        ("tenant", 100, 99),
        ("key", 2, 1),
        ("model", 3, 2),
    ]
    admission.check(new, acme, catalog, harness.now)
    with pytest.raises(TooManyRequests, match="With key a-key, tenant 'acme' may submit 1 jobs a second") as refused:
        admission.check(new, acme, catalog, harness.now)
    assert refused.value.facts["limit"] == "key:a-key" and refused.value.retry_after_s == 1.0
    assert [rate.left for rate in refused.value.rates] == [98, 0, 1], "none has counted it"
    other = harness.limited("acme", **limits)
    admission.check(new, other, catalog, harness.now)
    with pytest.raises(TooManyRequests, match="may submit for model 'zimg' 1 jobs a second"):
        admission.check(new, other, catalog, harness.now)
