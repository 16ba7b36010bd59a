"""The pool, with Celery's own strategy and request: wake-ups go to the event loop, other tasks to threads."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import control, state, strategy

from routing.queue.queues import Offer
from tasks import offer_messages
from tasks.extensions import control as remote_control
from tasks.extensions.consumer import Consumer
from tasks.extensions.pool import Pool
from tasks.inference import InferRequest, infer
from tasks.worker import worker as worker_module
from tasks.worker.concurrency import TakenOffer
from tests.support.task_messages import NoChannel, received

OFFER = Offer("zimg", "job-1", "lease-1", "gpu-slot0", "gpu", "zimg", 7)


class FakeWorker:
    """Records its offers.  It stands for the singleton `this_worker`, and for the worker's parts."""

    created = True

    def __init__(self) -> None:
        self.offers: list[Offer] = []
        self.executor = self.concurrency = self

    def __call__(self) -> "FakeWorker":
        return self

    def run_open_offer(self, offer: Offer) -> None:
        self.offers.append(offer)

    @property
    def runs(self) -> int:
        return len(self.offers)

    def taken_offers(self) -> list[TakenOffer]:
        return [TakenOffer(offer, since_s=5.0) for offer in self.offers]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> FakeWorker:
    fake = FakeWorker()
    monkeypatch.setattr(worker_module, "this_worker", fake)
    monkeypatch.setattr(remote_control, "this_worker", fake)
    return fake


@pytest.fixture
def consumer(worker: FakeWorker) -> Any:
    """Yield a consumer with the attributes that Celery's strategy uses."""
    state.reset_state()
    pool = Pool(2, app=infer.app)
    pool.start()
    yield SimpleNamespace(
        app=infer.app,
        hostname="worker@host",
        event_dispatcher=None,
        pool=pool,
        connection_errors=(),
        disable_rate_limits=True,
        timer=SimpleNamespace(call_at=None),
        task_buckets={},
        controller=SimpleNamespace(state=state),
        on_task_request=lambda request: request.execute_using_pool(pool),
        **dict.fromkeys(("apply_eta_task", "_limit_task", "_limit_post_eta")),
    )
    pool.executor.shutdown(cancel_futures=True)
    state.reset_state()


def _receive(consumer: Any, message: Any) -> NoChannel:
    """Pass a message to Celery's strategy, as its consumer does, and return the message's channel."""
    channel = NoChannel()
    delivered = received(message, channel)
    handle = strategy.default(infer, infer.app, consumer)
    handle(delivered, None, delivered.ack_log_error, delivered.reject_log_error, None)
    return channel


def test_a_wake_up_goes_to_the_loop_and_leaves_nothing_with_celery(consumer: Any, worker: FakeWorker) -> None:
    channel = _receive(consumer, offer_messages.build_message(OFFER, 2))
    assert worker.offers == [OFFER]
    assert (channel.acknowledged, channel.rejected) == (1, 0)
    assert not state.requests and not state.reserved_requests and not state.active_requests


def test_a_wake_up_that_cannot_be_read_is_acknowledged_and_runs_nothing(consumer: Any, worker: FakeWorker) -> None:
    message = offer_messages.build_message(OFFER, 2)
    channel = _receive(consumer, message._replace(headers=message.headers | {"slotkeeper": {"lease": 7}}))
    assert worker.offers == [] and channel.acknowledged == 1


def test_a_bare_message_is_a_task_in_a_thread_and_is_acknowledged_when_it_is_done(
    consumer: Any, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(consumer.pool.executor, "submit", lambda *call: submitted.append(call) or Future())
    channel = _receive(consumer, infer.app.amqp.as_task_v2("one", "infer", args=("zimg", {})))
    assert len(submitted) == 1 and worker.offers == [] and channel.acknowledged == 0
    _, _, _, _, on_success, on_accepted = submitted[0]
    on_accepted(1, 0.0)
    assert channel.acknowledged == 0
    on_success((False, None, 0.1))
    assert channel.acknowledged == 1


@pytest.mark.parametrize("header", [{}, {"slotkeeper": {}}])
def test_a_message_of_a_job_with_an_earliest_start_does_not_wait_in_the_worker(header: dict[str, Any]) -> None:
    message = infer.app.amqp.as_task_v2("one", "infer", args=("zimg", {}), countdown=600)
    request = InferRequest(received(message._replace(headers=message.headers | header)), task=infer, app=infer.app)
    assert request.eta is None


def test_a_worker_whose_places_are_taken_by_runs_receives_no_message(consumer: Any, worker: FakeWorker) -> None:
    """With `worker_disable_prefetch`, Celery reads from the pool how many messages it may hold."""
    assert consumer.pool.num_processes == 2
    worker.offers = [OFFER, OFFER]
    assert consumer.pool.num_processes == 0
    reconnected = object.__new__(Consumer)
    reconnected.pool, reconnected.prefetch_multiplier = consumer.pool, 1
    assert reconnected.max_prefetch_count == 2, "to a broker, 0 means that there is no limit"
    assert consumer.pool.info["runs"] == 2


def test_inspect_active_shows_each_run_as_celery_shows_a_task_and_where_it_is(worker: FakeWorker) -> None:
    worker.offers = [OFFER]
    state = SimpleNamespace(hostname="worker@host", tset=set)
    (shown,) = control.Panel.data["active"](state)
    message = received(offer_messages.build_message(OFFER, 0))
    info = InferRequest(message, task=infer, app=infer.app, hostname="worker@host").info()
    assert shown.keys() - info.keys() == {"server", "slot"} and not info.keys() - shown.keys()
    same = ("id", "name", "type", "kwargs", "hostname")
    assert [shown[name] for name in same] == [dict(info)[name] for name in same]
    assert (shown["server"], shown["slot"], shown["time_start"]) == ("gpu", "gpu-slot0", 5.0)
    assert control.Panel.data["dump_active"] is control.Panel.data["active"]
