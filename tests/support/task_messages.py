"""Messages of tasks as a worker receives them, made without a broker."""

from typing import Any

from celery.app.amqp import task_message
from kombu import Message
from kombu.utils import json


class NoChannel:
    """Stands for the channel that a message came by, and counts what is acknowledged and rejected."""

    no_ack_consumers: None = None

    def __init__(self) -> None:
        self.acknowledged, self.rejected = 0, 0

    def message_to_python(self, message: Any) -> Any:
        return message

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        self.acknowledged += 1

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self.rejected += 1


def received(message: task_message, channel: Any = None, queue: str = "celery") -> Message:
    """Return a message of Celery's as its consumer receives it from this queue."""
    return Message(
        body=json.dumps(message.body),
        delivery_tag="1",
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={"exchange": "", "routing_key": queue},
        properties=message.properties,
        headers=message.headers,
        accept={"application/json"},
        channel=channel or NoChannel(),
    )
