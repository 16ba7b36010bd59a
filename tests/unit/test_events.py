"""Events that are sent in bundles: the same for whoever receives them, however little they cost."""

import time
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from celery.events import EventDispatcher
from kombu import serialization

from tasks import events
from tasks.celery_app import celery
from tasks.events import Dispatcher

RUN = {"uuid": "job-1", "name": "infer", "args": "('zimg',)", "parent_id": None, "retries": 2}
STRANGE = {"digits": 10**100, "half a character": "\ud800", "moment": datetime(2026, 1, 2)}


class Broker:
    """A producer, and whoever reads what it sends."""

    def __init__(self) -> None:
        self.is_away = False
        self.read: list[Any] = []

    def publish(self, body: Any, serializer: Any, content_type: Any = "", content_encoding: Any = "", **_: Any) -> None:
        if self.is_away:
            raise ConnectionError
        if not content_type:  # as kombu's does
            content_type, content_encoding, body = serialization.dumps(body, serializer)
        self.read.append(serialization.loads(body, content_type, content_encoding, accept={"application/json"}))


def _dispatcher(made: Any = Dispatcher, **settings: Any) -> Any:
    connection = celery.connection_for_write("memory://")
    found = made(connection, hostname="worker@host", app=celery, buffer_group=["task"], enabled=False, **settings)
    found.enabled, found.producer = True, Broker()
    return found


def test_the_application_sends_its_events_so() -> None:
    assert issubclass(celery.events.Dispatcher, Dispatcher)


def test_an_event_says_what_celerys_own_says() -> None:
    said = []
    for made in (EventDispatcher, Dispatcher):
        dispatcher = _dispatcher(made)
        dispatcher.clock = SimpleNamespace(forward=lambda: 7)
        dispatcher.send("task-received", **RUN)
        dispatcher.flush()
        [[event]] = dispatcher.producer.read
        assert abs(time.time() - event.pop("timestamp")) < 60
        said.append(event)
    assert said[0] == said[1]


def test_a_bundle_is_read_in_its_order() -> None:
    dispatcher = _dispatcher()
    for n in range(3):
        dispatcher.send("task-started", uuid=f"job-{n}")
    dispatcher.flush()
    [bundle] = dispatcher.producer.read
    assert [it["uuid"] for it in bundle] == ["job-0", "job-1", "job-2"]
    assert [it["clock"] for it in bundle] == sorted({it["clock"] for it in bundle})
    dispatcher.flush()
    assert len(dispatcher.producer.read) == 1


@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE)
def test_what_only_celerys_own_way_can_write_is_sent_too(value: Any) -> None:
    dispatcher = _dispatcher()
    dispatcher.send("task-custom", uuid="job-1", value=value)
    dispatcher.flush()
    [[event]] = dispatcher.producer.read
    assert event["value"] == value


def test_events_that_the_broker_did_not_take_are_sent_when_it_is_back() -> None:
    dispatcher = _dispatcher()
    dispatcher.producer.is_away = True
    dispatcher.send("task-started", uuid="job-1")
    dispatcher.flush()
    dispatcher.producer.is_away = False
    dispatcher.flush()
    assert [[it["uuid"] for it in bundle] for bundle in dispatcher.producer.read] == [["job-1"]]


def test_a_bundle_that_is_full_is_sent_and_others_are_told_of() -> None:
    told: list[str] = []
    dispatcher = _dispatcher(buffer_limit=2, on_send_buffered=lambda: told.append("it waits"))
    dispatcher.send("task-started", uuid="job-1")
    assert (told, dispatcher.producer.read) == (["it waits"], [])
    dispatcher.send("task-started", uuid="job-2")
    assert len(told) == 1 and len(dispatcher.producer.read[0]) == 2


@pytest.mark.parametrize("nobody", ({"groups": ["worker"]}, {}), ids=("another group", "disabled"))
def test_what_nobody_wants_to_hear_is_not_kept(nobody: Any) -> None:
    dispatcher = _dispatcher(**nobody)
    dispatcher.enabled = bool(nobody)
    dispatcher.send("task-started", uuid="job-1")
    assert not any(dispatcher._group_buffer.values())


def test_an_event_says_the_offset_to_utc_of_its_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [1_000.0], iter([-1.0, -2.0, -3.0])
    monkeypatch.setattr(events, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr(events, "utcoffset", lambda: next(asked))
    dispatcher = _dispatcher()
    for at in (1_000.0, 1_000.9, 1_001.1, 500.0):  # The last one: somebody has set the clock back.
        now[0] = at
        dispatcher.send("task-started", uuid="job-1")
    dispatcher.flush()
    assert [it["utcoffset"] for it in dispatcher.producer.read[0]] == [-1.0, -1.0, -2.0, -3.0]


def test_other_events_go_at_once() -> None:
    dispatcher = _dispatcher()
    dispatcher.send("worker-heartbeat", freq=2)
    assert dispatcher.producer.read[0]["freq"] == 2
