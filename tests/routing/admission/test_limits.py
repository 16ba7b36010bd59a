"""The limits on submits: each is a row, the first that refuses decides, and Redis is called once for all."""

from collections.abc import Sequence

import pytest
from redis.connection import AbstractConnection

from routing.admission import submit_limits
from routing.admission.submission import Submission, prepare_job
from routing.admission.submit_limits import Limit, Phase
from slotkeeper.errors import InvalidJob, TooManyRequests
from slotkeeper.registry.identity import Tenant
from tests.support import limit_of_share
from tests.support.stage import Stage

ACME = Tenant("acme", rate_per_s=1, burst=3)


@pytest.fixture
def trips(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was sent to Redis, an entry for each round trip."""
    sent: list[object] = []
    send = AbstractConnection.send_packed_command

    def noted(self: AbstractConnection, command: object, check_health: bool = True) -> None:
        sent.append(command)
        send(self, command, check_health)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", noted)
    return sent


def check(stage: Stage, asked: Sequence[Submission], tenant: Tenant | None = None) -> None:
    """Apply the limits, and store nothing."""
    dispatcher = stage.dispatcher
    catalog = dispatcher.catalog.get()
    new = [prepare_job(one, catalog.resolve(one.request.model), lambda url: None, stage.now) for one in asked]
    dispatcher.admission.check(new, tenant, catalog, stage.now)


# -- the table ---------------------------------------------------------------------------------------------------


def test_limits_stand_in_the_order_of_their_phases():
    """What counts a submit comes last: a submit that is refused costs no turn of the rate."""
    phases = [limit.phase.value for limit in submit_limits.LIMITS]
    assert phases == sorted(phases)


def test_a_limit_that_is_added_applies_to_every_submit(stage, monkeypatch):
    stage.register(1)
    for n in range(10):
        stage.submit(tenant=f"t{n}")
    stage.submit(tenant="t1")
    monkeypatch.setattr(
        submit_limits, "LIMITS", (*submit_limits.LIMITS[:-1], limit_of_share.LIMIT, submit_limits.LIMITS[-1])
    )
    stage.submit(tenant="t1")
    with pytest.raises(TooManyRequests, match="Half of the jobs") as refused:
        stage.submit_all([stage.a(tenant="t1") for _ in range(10)], Tenant("t1"))
    assert refused.value.retry_after_s == 5.0
    stage.submit(tenant="t2")


# -- one round trip --------------------------------------------------------------------------------------------------


def test_all_limits_that_read_share_a_round_trip_and_the_rate_has_another(stage, trips, monkeypatch):
    for model in ("zimg", "flux"):
        stage.register(1, server=f"{model}-gpu", model=model, capacity=10)
    monkeypatch.setattr(
        submit_limits, "LIMITS", (*submit_limits.LIMITS[:-1], limit_of_share.LIMIT, submit_limits.LIMITS[-1])
    )
    asked = [stage.a("zimg", ttl_s=60.0), stage.a("zimg", constraints={"gpu": "A100"}), stage.a("flux", ttl_s=60.0)]
    check(stage, asked, ACME)  # scripts and catalog are known from now on
    stage.later(60_000)
    trips.clear()
    check(stage, asked, ACME)
    assert len(trips) == 2
    trips.clear()
    check(stage, asked)
    assert len(trips) == 1


def test_local_limits_do_not_call_redis(stage, trips):
    stage.register(1)
    check(stage, [stage.a()])
    trips.clear()
    check(stage, [stage.a()])
    assert trips == []


# -- which refusal -----------------------------------------------------------------------------------------------------


def test_a_submit_that_is_refused_costs_no_turn_of_the_rate(stage):
    stage.register(1, max_waiting=0)
    stage.submit()
    for _ in range(5):
        with pytest.raises(TooManyRequests, match="configured to hold 0"):
            check(stage, [stage.a()], ACME)
    stage.register(1, max_waiting=10)
    check(stage, [stage.a() for _ in range(3)], ACME)
    with pytest.raises(TooManyRequests, match="slow down"):
        check(stage, [stage.a()], ACME)


def test_only_free_slots_that_can_run_a_model_make_room_for_its_jobs(stage):
    stage.register(1, server="shared", max_waiting=0)
    stage.register(1, server="shared", model="flux")
    stage.register(10, server="large", model="flux")
    fleet = stage.dispatcher.catalog.get().models["zimg"].fleet
    stage.redis.set(f"clock:{{{fleet}}}", stage.now)
    with pytest.raises(InvalidJob, match="2 jobs at once exceed the limit"):
        check(stage, [stage.a(), stage.a()])
    stage.submit()
    with pytest.raises(TooManyRequests, match="configured to hold 0"):
        check(stage, [stage.a()])
    check(stage, [stage.a("flux") for _ in range(10)])


def test_jobs_of_several_tenants_count_together_where_the_limit_is_of_the_model(stage):
    stage.register(1, max_waiting=5)
    stage.submit_all([stage.a() for _ in range(2)])
    with pytest.raises(InvalidJob, match="20 jobs at once exceed the limit"):
        check(stage, [stage.a(tenant=f"t{n}") for n in range(20)])
    check(stage, [stage.a(tenant=f"t{n}") for n in range(4)])


def test_the_first_limit_that_refuses_decides_also_if_a_later_one_needs_no_redis(stage, monkeypatch):
    def refuse(request, context):
        raise InvalidJob("jobs", "never")

    stage.register(1, max_waiting=0)
    stage.submit()
    never = Limit("never", Phase.READ, refuse)
    monkeypatch.setattr(submit_limits, "LIMITS", (never, *submit_limits.LIMITS))
    with pytest.raises(InvalidJob, match="never"):
        check(stage, [stage.a()])
    monkeypatch.setattr(submit_limits, "LIMITS", (*submit_limits.LIMITS[1:], never))
    with pytest.raises(TooManyRequests, match="configured to hold 0"):
        check(stage, [stage.a()])
