"""The limits of concurrent deliveries, by host, tenant and group of receivers."""

from tasks.webhooks import delivery_queue
from tasks.webhooks.delivery_queue import MAX_IN_GROUP, DeliveryLimits, LimitGroup


def _fill(
    limits: DeliveryLimits, host_count: int, tenant: str = "one", name: str = "silent"
) -> list[delivery_queue.Permit]:
    """Start a delivery to each of `host_count` hosts that the limits allow, and return the permits."""
    hosts = [f"{name}{n}" for n in range(host_count)]
    return [limits.acquire(host, tenant) for host in hosts if limits.may_send(host, tenant)]


def test_a_receiver_that_was_never_tried_gets_one_try_at_a_time() -> None:
    limits = DeliveryLimits()
    first = limits.acquire("new", "one")
    assert not limits.may_send("new", "one")
    limits.release(first, None)
    assert limits.may_send("new", "one")


def test_a_receiver_has_several_concurrent_deliveries_until_one_fails() -> None:
    limits = DeliveryLimits()
    limits.release(limits.acquire("good", "one"), True)
    most = delivery_queue.MAX_PER_HOST
    permits = [limits.acquire("good", "one") for _ in range(most) if limits.may_send("good", "one")]
    assert len(permits) == most and not limits.may_send("good", "one")
    for permit in permits:
        limits.release(permit, False)
    limits.acquire("good", "one")
    assert not limits.may_send("good", "one")


def test_silent_receivers_of_one_tenant_leave_capacity_for_a_new_receiver_of_another() -> None:
    limits = DeliveryLimits()
    assert len(_fill(limits, 1000, "greedy")) == MAX_IN_GROUP[LimitGroup.UNPROVEN] // 2
    assert not limits.may_send("new", "greedy") and limits.may_send("new", "modest")


def test_silent_receivers_of_many_tenants_leave_capacity_for_a_new_receiver() -> None:
    limits = DeliveryLimits()
    shares = [len(_fill(limits, 1000, f"greedy{n}", f"silent{n}-")) for n in range(5)]
    assert limits.may_send("new", "modest") and sum(shares) < MAX_IN_GROUP[LimitGroup.UNPROVEN]


def test_receivers_whose_last_delivery_failed_share_a_smaller_limit() -> None:
    limits = DeliveryLimits()
    most = MAX_IN_GROUP[LimitGroup.FAILING]
    for permit in _fill(limits, most, "one") + _fill(limits, most // 2, "two", "dead"):
        limits.release(permit, False)
    assert len(_fill(limits, most, "one")) == most // 2
    assert limits.may_send("new", "one") and limits.may_send("dead1", "two")


def test_silent_new_receivers_do_not_block_a_receiver_that_works() -> None:
    limits = DeliveryLimits()
    limits.release(limits.acquire("good", "two"), True)
    for n in range(MAX_IN_GROUP[LimitGroup.UNPROVEN]):
        _fill(limits, 2, f"tenant{n}", f"silent{n}-")
    assert not limits.may_send("new", "tenant0") and limits.may_send("good", "two")


def test_a_tenant_gets_at_most_half_of_the_deliveries_at_once() -> None:
    limits = DeliveryLimits()
    for n in range(MAX_IN_GROUP[LimitGroup.ALL]):
        limits.release(limits.acquire(f"good{n}", "greedy"), True)
    assert len(_fill(limits, MAX_IN_GROUP[LimitGroup.ALL], "greedy", "good")) == MAX_IN_GROUP[LimitGroup.ALL] // 2
    assert not limits.may_send_for("greedy") and limits.may_send_for("modest") and limits.may_send("new", "modest")


def test_the_number_of_stored_results_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(delivery_queue, "_MAX_REMEMBERED_HOSTS", 3)
    limits = DeliveryLimits()
    for n in range(10):
        limits.release(limits.acquire(f"host{n}", "one"), True)
    assert len(limits._last_results) == 3 and not limits._hosts and not limits._taken_by_tenant
