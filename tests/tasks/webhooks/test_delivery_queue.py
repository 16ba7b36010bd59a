"""The order in which a fair queue returns due messages."""

from itertools import chain

import pytest

from tasks.webhooks import delivery_queue
from tasks.webhooks.delivery_queue import MAX_IN_GROUP, DeliveryLimits, DueMessage, FairQueue, LimitGroup, Permit


def _due(tenant: str, host: str, count: int = 1, name: str = "m") -> list[DueMessage]:
    return [DueMessage(f"{name}-{tenant}-{host}-{n}", host, tenant) for n in range(count)]


def _queue_of(*messages: list[DueMessage]) -> FairQueue:
    queue = FairQueue()
    for due in chain(*messages):
        queue.add(due)
    return queue


def _tenants(taken: list[tuple[DueMessage, Permit]]) -> list[str]:
    return [due.tenant for due, _ in taken]


def test_a_tenant_with_many_receivers_has_as_many_turns_as_one_with_a_single_receiver() -> None:
    limits = DeliveryLimits()
    limits.release(limits.acquire("good", "modest"), True)
    queue = _queue_of(*(_due("greedy", f"host{n}") for n in range(1000)), _due("modest", "good", 3))
    assert _tenants(queue.take(limits, 6)) == ["greedy", "modest"] * 3


def test_the_receivers_of_a_tenant_take_turns() -> None:
    limits = DeliveryLimits()
    for host in ("one", "two"):
        limits.release(limits.acquire(host, "t"), True)
    taken = _queue_of(_due("t", "one", 5), _due("t", "two", 2)).take(limits, 4)
    assert [due.receiver for due, _ in taken] == ["one", "two", "one", "two"]


def test_receivers_at_their_limit_block_others_for_a_few_turns_at_most() -> None:
    limits = DeliveryLimits()
    queue = _queue_of(*(_due("t", f"dead{n}") for n in range(200)), _due("t", "good"))
    for n in range(200):
        limits.release(limits.acquire(f"dead{n}", "t"), False)
    for n in range(MAX_IN_GROUP[LimitGroup.FAILING] // 2):
        limits.acquire(f"dead{n}", "t")
    taken = [due.id for _ in range(10) for due, _ in queue.take(limits, 64)]
    assert taken == ["m-t-good-0"]


def test_a_message_is_queued_once_and_removed_when_it_is_taken() -> None:
    (due,) = _due("t", "host")
    queue = _queue_of([due], [due])
    limits = DeliveryLimits()
    ((_, permit),) = queue.take(limits, 10)
    limits.release(permit, True)
    assert queue.take(limits, 10) == []
    queue.add(due)
    assert len(queue.take(limits, 10)) == 1


def test_a_full_queue_accepts_the_first_message_of_each_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_queue, "_MAX_QUEUED", 10)
    queue = _queue_of(_due("greedy", "host", 50), _due("modest", "other", 50))
    assert len(queue._ids) == 11


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://Hooks.Example:8443/a?b", "hooks.example:8443"),
        ("https://user:pass@host/a", "host"),
        ("https://[::1", "https://[::1"),
    ],
)
def test_the_receiver_of_a_callback_is_the_host_and_port_of_its_url(url: str, host: str) -> None:
    assert delivery_queue.host_of_url(url) == host
