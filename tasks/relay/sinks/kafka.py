"""A sink that publishes to a Kafka topic, keyed by job, so that one partition holds a job's events in order."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tasks.relay import cloudevents
from tasks.relay.sinks.sink import PublishedEvent, SinkUnavailable

log = structlog.get_logger(__name__)

_TIMEOUT_S = 4.0
_HEADERS: Any = [("content-type", cloudevents.CONTENT_TYPE.encode())]
_FIXED = {
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 5,
    # A timeout of single messages would drop one and deliver later ones.  Instead, `publish` closes a producer that
    # does not confirm, with all its messages, and the relay publishes them again.
    "message.timeout.ms": 0,
}


class KafkaSink:
    """A Sink.  After a failure, the next producer may send some events a second time."""

    retention = None

    def __init__(self, servers: str, topic: str, options: Mapping[str, Any]) -> None:
        self._settings = {**options, "bootstrap.servers": servers, **_FIXED}
        self._topic = topic
        self._producer: Producer | None = None

    def resume_after(self, position: int) -> int:
        return position

    def publish(self, batch: Sequence[PublishedEvent]) -> None:
        producer, failed, unconfirmed = self._connected_producer(), list[str](), len(batch)

        def on_delivery(error: KafkaError | None, _: Message) -> None:
            nonlocal unconfirmed
            unconfirmed -= 1
            if error is not None and not _is_too_large(error):
                failed.append(error.str())

        try:
            for event in batch:
                try:
                    producer.produce(
                        self._topic, event.body.encode(), event.key.encode(), on_delivery=on_delivery, headers=_HEADERS
                    )
                except KafkaException as error:
                    if not _is_too_large(error.args[0]):
                        raise
                    unconfirmed -= 1
            until = time.monotonic() + _TIMEOUT_S
            while unconfirmed and not failed and time.monotonic() < until:
                producer.poll(max(until - time.monotonic(), 0))
        except (KafkaException, BufferError) as error:
            self.close()
            raise SinkUnavailable(str(error)) from error
        if unconfirmed or failed:
            self.close()
            raise SinkUnavailable(failed[0] if failed else f"no answer within {_TIMEOUT_S:.0f} s")

    def _connected_producer(self) -> Producer:
        if self._producer is None:
            try:
                self._producer = Producer(self._settings)
            except KafkaException as error:
                raise SinkUnavailable(str(error)) from error
        return self._producer

    def close(self) -> None:
        """Close the producer without waiting for its unconfirmed messages."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            producer.flush(0)


def _is_too_large(error: KafkaError) -> bool:
    """Return whether Kafka rejects an event because of its size, and log it then."""
    if error.code() != KafkaError.MSG_SIZE_TOO_LARGE:
        return False
    # Such an event is skipped: it would be rejected each time, and would block all later events.
    log.error("event_too_large", sink="kafka", error=error.str())
    return True
