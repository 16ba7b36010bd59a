"""How many webhooks may be under way at once, and to whom."""

from tasks.webhooks import delivery_queue
from tasks.webhooks.delivery_queue import MAX_IN_GROUP, DeliveryLimits, LimitGroup


def _fill(room: DeliveryLimits, hosts: int, tenant: str = "one", name: str = "silent") -> list[delivery_queue.Permit]:
    wished = [f"{name}{n}" for n in range(hosts)]
    return [room.acquire(host, tenant) for host in wished if room.may_send(host, tenant)]


def test_a_receiver_that_was_never_tried_gets_one_try_at_a_time() -> None:
    room = DeliveryLimits()
    first = room.acquire("new", "one")
    assert not room.may_send("new", "one")
    room.release(first, None)
    assert room.may_send("new", "one")


def test_a_receiver_that_answers_gets_several_tries_and_loses_them_when_it_falls_silent() -> None:
    room = DeliveryLimits()
    room.release(room.acquire("good", "one"), True)
    tries = [room.acquire("good", "one") for _ in range(delivery_queue.MAX_PER_HOST) if room.may_send("good", "one")]
    assert len(tries) == delivery_queue.MAX_PER_HOST and not room.may_send("good", "one")
    for one in tries:
        room.release(one, False)
    room.acquire("good", "one")
    assert not room.may_send("good", "one")


def test_silent_receivers_of_one_tenant_leave_room_for_one_that_is_new() -> None:
    room = DeliveryLimits()
    assert len(_fill(room, 1000, "greedy")) == MAX_IN_GROUP[LimitGroup.UNPROVEN] // 2
    assert not room.may_send("new", "greedy") and room.may_send("new", "modest")


def test_silent_receivers_of_many_tenants_leave_room_for_one_that_is_new() -> None:
    room = DeliveryLimits()
    shares = [len(_fill(room, 1000, f"greedy{n}", f"silent{n}-")) for n in range(5)]
    assert room.may_send("new", "modest") and sum(shares) < MAX_IN_GROUP[LimitGroup.UNPROVEN]


def test_receivers_whose_last_try_failed_share_a_small_part() -> None:
    room = DeliveryLimits()
    for one in _fill(room, MAX_IN_GROUP[LimitGroup.FAILING], "one") + _fill(
        room, MAX_IN_GROUP[LimitGroup.FAILING] // 2, "two", "dead"
    ):
        room.release(one, False)
    assert len(_fill(room, MAX_IN_GROUP[LimitGroup.FAILING], "one")) == MAX_IN_GROUP[LimitGroup.FAILING] // 2
    assert room.may_send("new", "one") and room.may_send("dead1", "two")


def test_a_receiver_that_answers_is_served_however_many_strangers_are_silent() -> None:
    room = DeliveryLimits()
    room.release(room.acquire("good", "two"), True)
    for n in range(MAX_IN_GROUP[LimitGroup.UNPROVEN]):
        _fill(room, 2, f"tenant{n}", f"silent{n}-")
    assert not room.may_send("new", "tenant0") and room.may_send("good", "two")


def test_no_tenant_gets_more_berths_than_it_leaves_free() -> None:
    room = DeliveryLimits()
    for n in range(MAX_IN_GROUP[LimitGroup.ALL]):
        room.release(room.acquire(f"good{n}", "greedy"), True)
    assert len(_fill(room, MAX_IN_GROUP[LimitGroup.ALL], "greedy", "good")) == MAX_IN_GROUP[LimitGroup.ALL] // 2
    assert not room.may_send_for("greedy") and room.may_send_for("modest") and room.may_send("new", "modest")


def test_what_is_remembered_of_receivers_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(delivery_queue, "_MAX_REMEMBERED_HOSTS", 3)
    room = DeliveryLimits()
    for n in range(10):
        room.release(room.acquire(f"host{n}", "one"), True)
    assert len(room._last_results) == 3 and not room._hosts and not room._taken_by_tenant
