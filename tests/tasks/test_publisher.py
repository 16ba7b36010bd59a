"""Messages are sent by a thread of their own: whoever has one to send waits for nobody."""

import threading
from collections.abc import Callable
from typing import NoReturn

from tasks.offer_messages import Publisher


def _fails() -> NoReturn:
    raise ConnectionError("the broker is away")


def test_messages_are_sent_in_the_order_in_which_they_were_handed_in():
    sent: list[int] = []
    publisher = Publisher()
    for number in range(20):
        publisher.put(lambda number=number: sent.append(number))
    assert publisher.flush(10)
    assert sent == list(range(20))


def test_a_message_that_cannot_be_sent_does_not_keep_the_next_from_being_sent():
    sent: list[str] = []
    publisher = Publisher()
    publisher.put(_fails)
    publisher.put(lambda: sent.append("next"))
    assert publisher.flush(10)
    assert sent == ["next"]


def test_a_silent_broker_keeps_nobody_waiting_and_fills_no_memory():
    answers, sent = threading.Event(), []
    publisher = Publisher(max_pending=3)

    def message(number: int) -> Callable[[], object]:
        return lambda: answers.wait(30) and sent.append(number)

    for number in range(100):
        publisher.put(message(number))
    assert not publisher.flush(0) and sent == []
    answers.set()
    assert publisher.flush(10)
    assert sent == sorted(sent) and 3 <= len(sent) <= 5, "the others are dropped, which costs a moment each"
