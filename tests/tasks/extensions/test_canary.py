"""Canaries are sent by one thread and received by another."""

from types import SimpleNamespace
from typing import Any

import pytest

from tasks.extensions import canary
from tasks.extensions.canary import Canary


def test_a_canary_may_be_received_while_the_next_one_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "publish_queue", lambda: SimpleNamespace(put=lambda send: None))
    own = Canary(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    own.make_queue("worker@host")

    class ReceivedMeanwhile(float):
        def __rsub__(self, now: Any) -> Any:
            own._sent.pop("b", None)
            return now - float(self)

    own._sent = {"a": ReceivedMeanwhile(0.0), "b": 0.0, "c": 0.0}
    own.send_if_due()
    assert len(own._sent) >= 1
