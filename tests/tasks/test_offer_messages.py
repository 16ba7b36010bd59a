"""Wake-ups: the offer in a message, and messages of other releases and of unknown senders."""

from dataclasses import replace
from typing import Any

import pytest

from routing.queue.queues import Offer
from slotkeeper.jobs.values import QueuedJob
from tasks import offer_messages, results
from tasks.offer_messages import OFFER_HEADER, Publisher, is_wake_up

OFFER = Offer("zimg", "j1", "lease-1", "gpu-slot0", "gpu", "zimg", 7)


def _headers(**changes: Any) -> dict[str, Any]:
    message = offer_messages.build_message(OFFER, 0)
    return {OFFER_HEADER: message.headers[OFFER_HEADER] | changes}


def test_a_wake_up_carries_its_offer():
    assert offer_messages.read_offer("j1", ["zimg"], _headers()) == OFFER


def test_an_offer_in_a_message_is_open_although_the_message_names_an_owner():
    """The message cannot claim an offer; only the lease in Redis names the owner."""
    message = offer_messages.build_message(replace(OFFER, owner="worker/1"), 0)
    assert "owner" not in message.headers[OFFER_HEADER]
    offer = offer_messages.read_offer("j1", ["zimg"], _headers(owner="worker/1"))
    assert offer is not None and offer.owner == ""


def test_an_unknown_field_in_a_wake_up_is_ignored():
    assert offer_messages.read_offer("j1", ["zimg"], _headers(colour="blue")) == OFFER


def test_the_wake_up_of_a_new_job_is_built_without_a_database_read(monkeypatch: pytest.MonkeyPatch):
    sent, publisher = [], Publisher()
    monkeypatch.setattr(results, "publish_queue", lambda: publisher)
    monkeypatch.setattr(results.CeleryNotifier, "_publish_waiting_job", lambda _, offer: sent.append("read"))
    monkeypatch.setattr(
        offer_messages, "publish_offer", lambda offer, priority, failures: sent.append((offer, priority, failures))
    )
    notifier = results.CeleryNotifier(None, None)
    notifier.wake_worker(OFFER, QueuedJob("j1", 1, "zimg", 2, "default"))
    notifier.wake_worker(OFFER, None)
    assert publisher.flush(5) and sent == [(OFFER, 2, 0), "read"]


@pytest.mark.parametrize("name", ["fleet", "lease", "slot", "server", "number"])
@pytest.mark.parametrize("value", [None, [], {}, 1.5])
def test_a_wake_up_with_an_invalid_field_is_ignored_without_an_error(name, value):
    assert offer_messages.read_offer("j1", ["zimg"], _headers(**{name: value})) is None


@pytest.mark.parametrize(
    ("args", "header"), [([], {}), ([["zimg"]], {}), (["zimg"], None), (["zimg"], "x"), (["zimg"], [1])]
)
def test_a_wake_up_without_an_offer_is_ignored_without_an_error(args, header):
    assert offer_messages.read_offer("j1", args, {OFFER_HEADER: header}) is None


@pytest.mark.parametrize(
    ("headers", "wakes"), [(None, False), ({}, False), ({"x": 1}, False), ({"slotkeeper": None}, True)]
)
def test_a_message_without_the_offer_header_is_a_plain_celery_task(headers, wakes):
    assert is_wake_up(headers) is wakes
