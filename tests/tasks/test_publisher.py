"""The publisher, which sends messages in a separate thread, so that its callers do not wait for the broker."""

import threading
from collections.abc import Callable
from typing import NoReturn

from tasks.offer_messages import Publisher


def _fail() -> NoReturn:
    raise ConnectionError("the broker is away")


def test_messages_are_sent_in_the_order_of_their_put_calls():
    sent: list[int] = []
    publisher = Publisher()
    for number in range(20):
        publisher.put(lambda number=number: sent.append(number))
    assert publisher.flush(10)
    assert sent == list(range(20))


def test_a_message_that_cannot_be_sent_does_not_block_the_next_one():
    sent: list[str] = []
    publisher = Publisher()
    publisher.put(_fail)
    publisher.put(lambda: sent.append("next"))
    assert publisher.flush(10)
    assert sent == ["next"]


def test_a_silent_broker_blocks_no_caller_and_pending_messages_are_bounded():
    broker_responds, sent = threading.Event(), []
    publisher = Publisher(max_pending=3)

    def send_command(number: int) -> Callable[[], object]:
        return lambda: broker_responds.wait(30) and sent.append(number)

    for number in range(100):
        publisher.put(send_command(number))
    assert not publisher.flush(0) and sent == []
    broker_responds.set()
    assert publisher.flush(10)
    assert sent == sorted(sent) and 3 <= len(sent) <= 5, (
        "the publisher drops the others; the poller finds their offers later"
    )
