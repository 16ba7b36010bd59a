"""Whose message is sent next, of many that are due."""

import pytest

from tasks.webhooks import delivery_queue
from tasks.webhooks.delivery_queue import MAX_IN_GROUP, DeliveryLimits, DueMessage, FairQueue, LimitGroup, Permit


def _due(tenant: str, host: str, count: int = 1, name: str = "m") -> list[DueMessage]:
    return [DueMessage(f"{name}-{tenant}-{host}-{n}", host, tenant) for n in range(count)]


def _known(*dues: list[DueMessage]) -> FairQueue:
    found = FairQueue()
    for due in [one for its in dues for one in its]:
        found.add(due)
    return found


def _tenants(taken: list[tuple[DueMessage, Permit]]) -> list[str]:
    return [owed.tenant for owed, _ in taken]


def test_a_tenant_with_many_receivers_has_no_more_turns_than_one_with_a_single_one() -> None:
    berths = DeliveryLimits()
    berths.release(berths.acquire("good", "modest"), True)
    piled = _known(*(_due("greedy", f"host{n}") for n in range(1000)), _due("modest", "good", 3))
    assert _tenants(piled.take(berths, 6)) == ["greedy", "modest"] * 3


def test_of_one_tenant_its_receivers_take_turns() -> None:
    berths = DeliveryLimits()
    for host in ("one", "two"):
        berths.release(berths.acquire(host, "t"), True)
    taken = _known(_due("t", "one", 5), _due("t", "two", 2)).take(berths, 4)
    assert [owed.receiver for owed, _ in taken] == ["one", "two", "one", "two"]


def test_receivers_that_may_not_be_tried_now_hide_those_that_may_for_a_few_turns_at_most() -> None:
    berths = DeliveryLimits()
    waiting = _known(*(_due("t", f"dead{n}") for n in range(200)), _due("t", "good"))
    for n in range(200):
        berths.release(berths.acquire(f"dead{n}", "t"), False)
    for n in range(MAX_IN_GROUP[LimitGroup.FAILING] // 2):
        berths.acquire(f"dead{n}", "t")
    found = [owed.id for _ in range(10) for owed, _ in waiting.take(berths, 64)]
    assert found == ["m-t-good-0"]


def test_a_message_is_known_once_and_forgotten_when_it_begins() -> None:
    (due,) = _due("t", "host")
    piled = _known([due], [due])
    berths = DeliveryLimits()
    ((_, berth),) = piled.take(berths, 10)
    berths.release(berth, True)
    assert piled.take(berths, 10) == []
    piled.add(due)
    assert len(piled.take(berths, 10)) == 1


def test_a_pile_leaves_room_for_the_first_of_everybody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_queue, "_MAX_REMEMBERED", 10)
    piled = _known(_due("greedy", "host", 50), _due("modest", "other", 50))
    assert len(piled._ids) == 11


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://Hooks.Example:8443/a?b", "hooks.example:8443"),
        ("https://user:pass@host/a", "host"),
        ("https://[::1", "https://[::1"),
    ],
)
def test_a_message_is_for_the_host_and_port_of_its_address(url: str, host: str) -> None:
    assert delivery_queue.host_of_url(url) == host
