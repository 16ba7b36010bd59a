"""An exchange of an AMQP broker, such as RabbitMQ: of the kind `topic`, with the event's type as routing key."""

import time
from collections.abc import Sequence
from typing import Any

from amqp.exceptions import AMQPError, MessageNacked
from kombu import Connection, Producer
from kombu import Exchange as Declared
from kombu.exceptions import OperationalError

from tasks.relay import cloudevents
from tasks.relay.sinks.sink import PublishedEvent, SinkUnavailable

_TIMEOUT_S = 4.0
_IDLE_S = 20.0  # Nobody answers the broker's heartbeats between two batches, and it closes what is silent.


class AmqpSink:
    """A Sink.  The broker confirms a message when all durable queues that are bound keep it; without any it is gone."""

    retention = None

    def __init__(self, url: str, exchange: str) -> None:
        self._url = url
        self._exchange = Declared(exchange, type="topic", durable=True)
        self._session: _Session | None = None

    def resume_after(self, position: int) -> int:
        return position

    def publish(self, batch: Sequence[PublishedEvent]) -> None:
        if self._session is not None and self._session.is_idle():
            self.close()
        try:
            if self._session is None:
                self._session = _Session(self._url, self._exchange)
            self._session.publish(batch)
        except (OperationalError, OSError, AMQPError, MessageNacked) as error:
            self.close()
            raise SinkUnavailable(str(error) or type(error).__name__) from error

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


class _Session:
    """One connection, and what the broker has confirmed on its one channel.

    A whole batch is sent before the first confirmation is waited for: a broker may take as long for one as for many.
    """

    def __init__(self, url: str, exchange: Declared) -> None:
        options = {"read_timeout": _TIMEOUT_S, "write_timeout": _TIMEOUT_S, "confirm_publish": False}
        self._connection = Connection(url, connect_timeout=_TIMEOUT_S / 2, transport_options=options)
        self._sent = 0
        self._unconfirmed: set[int] = set()
        self._used_s = time.monotonic()
        try:
            channel: Any = self._connection.channel()  # py-amqp's, of which kombu's types do not know all.
            channel.events["basic_ack"].add(self._on_ack)
            channel.events["basic_nack"].add(self._on_nack)
            channel.confirm_select()
            self._producer = Producer(channel, exchange)
        except BaseException:
            self.close()
            raise

    def is_idle(self) -> bool:
        return time.monotonic() - self._used_s > _IDLE_S

    def publish(self, batch: Sequence[PublishedEvent]) -> None:
        """Returns when all of them are confirmed."""
        for event in batch:
            self._send(event)
        until = time.monotonic() + _TIMEOUT_S
        while self._unconfirmed:
            self._connection.drain_events(timeout=max(until - time.monotonic(), 0.001))
        self._used_s = time.monotonic()

    def _send(self, event: PublishedEvent) -> None:
        self._sent += 1  # The broker counts them as well.
        self._unconfirmed.add(self._sent)
        self._producer.publish(
            event.body.encode(),
            routing_key=event.type,
            content_type=cloudevents.CONTENT_TYPE,
            content_encoding="utf-8",
            delivery_mode=2,
            message_id=str(event.number),
            retry=False,
        )

    def _on_ack(self, number: int, and_before: bool) -> None:
        confirmed = (
            {sent_number for sent_number in self._unconfirmed if sent_number <= number} if and_before else {number}
        )
        self._unconfirmed -= confirmed

    def _on_nack(self, number: int, and_before: bool) -> None:
        raise MessageNacked

    def close(self) -> None:
        """Without a farewell, which a broker that is away would not answer."""
        self._connection.collect(socket_timeout=_TIMEOUT_S)
