"""The rate limit of a tenant: it admits the burst at once, then the rate, and a refused submit costs nothing."""

import pytest
from redis import Redis

from routing.admission.submit_limits import LimitContext, RateAnswer, RateBucket
from routing.config import RoutingSettings
from routing.queue.queues import Queues
from routing.scripts import make_scripts
from slotkeeper.redis.keys import Keys
from tests.support.fleet_queue import FRAGMENTS, START_MS

KEY = "test:rate:acme"


class Rate:
    """The rate limit of one tenant: 10 a second, 5 at once."""

    def __init__(self, client: Redis, interval_ms: float = 100, burst: int = 5) -> None:
        self.client, self.interval_ms, self.burst = client, interval_ms, burst
        self.queues = Queues(make_scripts(client, Keys("test"), FRAGMENTS), RoutingSettings())
        self.context = LimitContext(None, self.queues, RoutingSettings(), None, None)  # type: ignore[arg-type]
        self.set_clock(START_MS)

    def set_clock(self, now_ms: int) -> None:
        self.now = now_ms
        for tenant in ("acme", "other"):
            self.client.set(f"clock:{{test:rate:{tenant}}}", now_ms)

    def later(self, ms: int) -> None:
        self.set_clock(self.now + ms)

    def admit(self, count: int = 1, tenant: str = "acme") -> int:
        return self.ask(RateBucket("tenant", count, self.interval_ms, self.burst), tenant=tenant)[0].wait_ms

    def ask(self, *buckets: RateBucket, tenant: str = "acme") -> list[RateAnswer]:
        (answers,) = self.queues.run_all([self.context.rate_limit_command(tenant, buckets)])
        return answers


@pytest.fixture
def rate(client: Redis) -> Rate:
    return Rate(client)


def test_a_burst_is_admitted_at_once_and_then_one_submit_per_interval(rate):
    assert [rate.admit() for _ in range(7)] == [0, 0, 0, 0, 0, 100, 100]
    rate.later(99)
    assert rate.admit() == 1
    rate.later(1)
    assert [rate.admit(), rate.admit()] == [0, 100]


def test_over_a_long_time_exactly_the_rate_is_admitted(rate):
    admitted = 0
    for _ in range(1001):
        admitted += rate.admit() == 0
        rate.later(7)
    assert admitted == 5 + 7000 // 100


def test_a_submit_is_admitted_after_the_returned_wait(rate):
    rate.admit(5)
    rate.later(30)
    wait = rate.admit(3)
    assert wait == 270
    rate.later(wait - 1)
    assert rate.admit(3) == 1
    rate.later(1)
    assert rate.admit(3) == 0


def test_a_refusal_leaves_no_trace(rate, client):
    rate.admit(5)
    before = (client.hget(KEY, "tenant"), client.pexpiretime(KEY))
    assert rate.admit() > 0
    assert (client.hget(KEY, "tenant"), client.pexpiretime(KEY)) == before


def test_a_first_submit_that_is_refused_leaves_no_key(rate, client):
    assert rate.admit(6) == 100
    assert client.hget(KEY, "tenant") is None


def test_idle_time_refills_the_burst_up_to_its_size(rate):
    rate.admit(5)
    rate.later(3_600_000)
    assert [rate.admit(5), rate.admit()] == [0, 100]


@pytest.mark.parametrize(("rate_per_s", "burst"), [(3, 1), (7, 2), (1000, 1), (30, 30)])
def test_a_rate_with_a_fractional_interval_is_enforced_exactly(client, rate_per_s, burst):
    rate = Rate(client, 1000 / rate_per_s, burst)
    admitted = 0
    for _ in range(3000):
        admitted += rate.admit() == 0
        client.persist(KEY)  # It lives by the real clock, and this may take longer than what it counts.
        rate.later(1)
    assert abs(admitted - (burst + 3 * rate_per_s)) <= 1


def test_the_submits_of_a_tenant_do_not_count_toward_the_rate_limit_of_another_tenant(rate):
    rate.admit(5)
    assert rate.admit(5, "other") == 0


def test_the_redis_key_expires_when_the_rate_debt_is_paid(rate, client):
    rate.admit(5)
    assert 500 <= client.pttl(KEY) <= 1500


def test_a_refused_bucket_leaves_the_others_uncounted(rate):
    tenant, model = RateBucket("tenant", 1, 100, 5), RateBucket("model:zimg", 1, 1000, 1)
    assert rate.ask(tenant, model) == [(0, 4), (0, 0)]
    assert rate.ask(tenant, model) == [(0, 4), (1000, 0)]
    assert rate.ask(tenant) == [(0, 3)], "the refused submit was not counted"
    rate.later(1000)
    assert rate.ask(tenant, model) == [(0, 4), (0, 0)]


def test_rates_of_one_tenant_are_apart(rate):
    zimg, flux = RateBucket("model:zimg", 1, 100, 1), RateBucket("model:flux", 1, 100, 1)
    assert [rate.ask(bucket)[0].wait_ms for bucket in (zimg, flux, zimg)] == [0, 0, 100]
