"""A sink that publishes to a topic exchange of an AMQP broker such as RabbitMQ; the routing key is the event's type."""

import time
from collections.abc import Sequence
from typing import Any

from amqp.exceptions import AMQPError, MessageNacked
from kombu import Connection, Exchange, Producer
from kombu.exceptions import OperationalError

from tasks.relay import cloudevents
from tasks.relay.sinks.sink import PublishedEvent, SinkUnavailable

_TIMEOUT_S = 4.0
# A connection that was idle for longer is replaced: nothing sends heartbeats between two batches, and a broker closes
# a connection without them.
_IDLE_S = 20.0


class AmqpSink:
    """A Sink.

    The broker confirms a message when all bound durable queues have stored it.  If no queue is bound, it drops the
    message and confirms it all the same.
    """

    retention = None

    def __init__(self, url: str, exchange: str) -> None:
        self._url = url
        self._exchange = Exchange(exchange, type="topic", durable=True)
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
    """One connection with one channel, and the messages on it that the broker has not confirmed.

    A batch is sent before any confirmation is awaited, because confirming one message may take as long as many.
    """

    def __init__(self, url: str, exchange: Exchange) -> None:
        options = {"read_timeout": _TIMEOUT_S, "write_timeout": _TIMEOUT_S, "confirm_publish": False}
        self._connection = Connection(url, connect_timeout=_TIMEOUT_S / 2, transport_options=options)
        self._sent = 0
        self._unconfirmed: set[int] = set()
        self._used_s = time.monotonic()
        try:
            channel: Any = self._connection.channel()  # Any: kombu's types lack some methods of py-amqp's channel.
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
        """Send a batch, and return when the broker has confirmed all of it."""
        for event in batch:
            self._send(event)
        until = time.monotonic() + _TIMEOUT_S
        while self._unconfirmed:
            self._connection.drain_events(timeout=max(until - time.monotonic(), 0.001))
        self._used_s = time.monotonic()

    def _send(self, event: PublishedEvent) -> None:
        self._sent += 1  # the delivery tag that the broker uses in its confirmation
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

    def _on_ack(self, tag: int, multiple: bool) -> None:
        self._unconfirmed -= {sent for sent in self._unconfirmed if sent <= tag} if multiple else {tag}

    def _on_nack(self, tag: int, multiple: bool) -> None:
        raise MessageNacked

    def close(self) -> None:
        """Close the socket without AMQP's closing handshake, which would block if the broker does not respond."""
        self._connection.collect(socket_timeout=_TIMEOUT_S)
