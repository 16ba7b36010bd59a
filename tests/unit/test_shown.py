"""What Celery is told of a run that no message brought, and how a result is written for it."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from celery.app import trace
from celery.events import EventDispatcher
from celery.worker import state, strategy
from celery.worker.request import Request

from foundation import exact, large_json
from routing.queues import Offer
from tasks import messages
from tasks.inference import infer
from tasks.shown import Reception, Shown, _beginning

OFFER = Offer("zimg", "job-1", "lease-1", "gpu-slot0", "gpu", "zimg", 7)
_OF_THE_MOMENT = ("timestamp", "clock", "utcoffset")


class Listener(EventDispatcher):
    """Keeps what it is to send."""

    def __init__(self) -> None:
        super().__init__(app=infer.app, enabled=False, hostname="worker@host")
        self.enabled = True
        self.heard: list[dict[str, Any]] = []

    def send(self, type: str, **fields: Any) -> None:  # type: ignore[override]
        self.heard.append({"type": type, **fields})


@pytest.fixture
def consumer() -> Any:
    state.reset_state()
    found = SimpleNamespace(
        app=infer.app,
        hostname="worker@host",
        event_dispatcher=Listener(),
        pool=SimpleNamespace(apply_async=lambda *_, **__: None),
        connection_errors=(),
        disable_rate_limits=True,
        timer=SimpleNamespace(call_at=None),
        task_buckets={},
        controller=SimpleNamespace(state=state),
        taken=[],
        **dict.fromkeys(("apply_eta_task", "_limit_task", "_limit_post_eta")),
    )
    found.on_task_request = found.taken.append
    yield found
    state.reset_state()


BY_ITS_QUEUE = {"exchange": "", "routing_key": "gpu.zimg", "priority": 3, "redelivered": False}


def _by_celerys_strategy(consumer: Any, message: Any = None, ack: Any = lambda *_: None) -> Request:
    handle = strategy.default(infer, infer.app, consumer)
    handle(message or messages.handed_on(OFFER, 2), None, ack, lambda *_: None, None)
    return consumer.taken.pop()


def test_a_run_that_no_message_brought_is_told_in_the_words_of_celerys_strategy(consumer: Any) -> None:
    theirs = _by_celerys_strategy(consumer)

    ours = Reception(consumer).receive(OFFER, 2)

    assert ours.info() == theirs.info() and ours.request_dict == theirs.request_dict
    assert state.requests == {"job-1": ours} and ours in state.reserved_requests


def test_a_run_that_no_message_brought_is_active_until_it_ends(consumer: Any) -> None:
    shown = Shown()
    shown.introduce(Reception(consumer), OFFER, 0)
    shown.began()
    assert [it.id for it in state.active_requests] == ["job-1"] and state.total_count == {"infer": 1}
    shown.ended({"url": "x"})
    assert not state.active_requests and not state.requests


def test_a_whole_request_is_made_once_and_only_for_who_looks(consumer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = messages.handed_on
    monkeypatch.setattr(messages, "handed_on", lambda offer, *of: made.append(offer.job_id) or real(offer, *of))
    shown, reception = Shown(), Reception(consumer)
    shown.introduce(reception, OFFER, 0)
    shown.began()
    assert not made
    [request] = state.active_requests
    told = request.info()
    assert told["acknowledged"] and told["time_start"] and told["worker_pid"] and told["args"] == ("zimg",)
    assert request._context.id == "job-1" and made == ["job-1"]
    shown.ended(None)
    assert made == ["job-1"] and not state.successful_requests


LEVELS = {"INFO": ["Task infer[job-1] received", "Task infer[job-1] succeeded"], "WARNING": []}


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_has_its_lines_in_the_log_at_the_level_of_info(
    consumer: Any, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    for name in (strategy.logger.name, trace.logger.name):
        caplog.set_level(level, name)
    shown = Shown()
    shown.introduce(Reception(consumer), OFFER, 0)
    shown.began()
    shown.ended(None)
    assert [it.getMessage().partition(" in ")[0] for it in caplog.records] == LEVELS[level]


def test_a_worker_publishes_no_event_of_a_run_also_where_flower_asks_for_them(consumer: Any) -> None:
    shown = Shown(_by_celerys_strategy(consumer))
    shown.introduce(Reception(consumer), OFFER, 0)
    shown.began()
    shown.ended(None)
    assert consumer.event_dispatcher.heard == []


def test_of_a_run_that_a_message_brought_celery_keeps_what_it_asks_and_not_the_message(consumer: Any) -> None:
    message, acknowledged = messages.handed_on(OFFER, 2, BY_ITS_QUEUE), []
    request = _by_celerys_strategy(consumer, message, ack=lambda *_: acknowledged.append(1))
    told, headers, kept = request.info(), {**request.request_dict}, weakref.ref(message)
    shown = Shown(request)
    del message, request

    shown.introduce(Reception(consumer), OFFER, 2)
    shown.began()

    assert kept() is None and acknowledged
    [left] = state.active_requests
    assert [*state.reserved_requests] == [*state.requests.values()] == [left] and state.total_count == {"infer": 1}
    of_now = {name: left.info()[name] for name in ("acknowledged", "time_start", "worker_pid")}
    assert left.info() == told | of_now and all(of_now.values())
    assert left.request_dict == headers
    shown.ended({"url": "x"})
    assert not state.active_requests and not state.reserved_requests and not state.requests


def test_a_run_that_a_message_brought_is_reserved_once_though_somebody_still_has_its_first_request(
    consumer: Any,
) -> None:
    request = _by_celerys_strategy(consumer)
    shown = Shown(request)
    shown.introduce(Reception(consumer), OFFER, 2)
    [reserved] = state.reserved_requests
    assert reserved is not request


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (None, "null"),
        ({"url": "http://h/x.png", "seed": 7}, '{"url":"http://h/x.png","seed":7}'),
        ("x" * 2_000, '"' + "x" * 1_023 + "…"),
        ([[]] * 5_000, "[" + "[]," * 341 + "…"),
        (exact.Unparsed(b"[" + b"1," * 3_000 + b"1]", large_json.member), "[" + "1," * 511 + "1…"),
    ],
    ids=["null", "object", "text", "lists", "unparsed"],
)
def test_of_a_result_the_log_has_the_beginning(result: Any, shown: str) -> None:
    assert _beginning(result, 1024) == shown
