"""Sinks: where the relay publishes events.  Each is a module here and a value of SLOTKEEPER_EVENTS_TO."""

from collections.abc import Callable, Mapping

from slotkeeper.errors import InvalidSetting
from tasks.config import EventSettings
from tasks.relay.sinks.sink import Sink
from tasks.services import database, scripts

FindEvent = Callable[[int], "str | None"]
"""Returns the published JSON of the event with this number; None: it is not in the database."""


def make(name: str, settings: EventSettings, find_event: FindEvent) -> Sink:
    """Return the sink of this name, and import its library.

    Raises InvalidSetting if a setting or a library is missing.
    """
    return _MAKERS[name](settings, find_event)


def _redis(settings: EventSettings, find_event: FindEvent) -> Sink:
    from tasks.relay.sinks.redis_stream import EventStream, RedisStreamSink

    return RedisStreamSink(EventStream(scripts(), settings.stream_length), settings.stream_length, find_event)


def _kafka(settings: EventSettings, _: FindEvent) -> Sink:
    _require(settings.kafka_servers, "SLOTKEEPER_EVENTS_KAFKA_SERVERS", "host:9092")
    try:
        from tasks.relay.sinks.kafka import KafkaSink
    except ImportError as error:
        raise InvalidSetting("the library for Kafka is missing: pip install 'slotkeeper[kafka]'.") from error

    return KafkaSink(settings.kafka_servers, settings.kafka_topic, settings.kafka_options)


def _nats(settings: EventSettings, _: FindEvent) -> Sink:
    _require(settings.nats_url, "SLOTKEEPER_EVENTS_NATS_URL", "nats://host:4222")
    try:
        from tasks.relay.sinks.nats import NatsSink
    except ImportError as error:
        raise InvalidSetting("the library for NATS is missing: pip install 'slotkeeper[nats]'.") from error

    return NatsSink(settings.nats_url, settings.nats_stream)


def _amqp(settings: EventSettings, _: FindEvent) -> Sink:
    _require(settings.amqp_url, "SLOTKEEPER_EVENTS_AMQP_URL", "amqp://user:password@host/vhost")
    from tasks.relay.sinks.amqp import AmqpSink

    return AmqpSink(settings.amqp_url, settings.amqp_exchange)


def _otlp(settings: EventSettings, _: FindEvent) -> Sink:
    _require(settings.otlp_endpoint, "SLOTKEEPER_EVENTS_OTLP_ENDPOINT", "http://host:4318")
    try:
        from tasks.relay.sinks import otlp
    except ImportError as error:
        raise InvalidSetting("the library for traces is missing: pip install 'slotkeeper[otel]'.") from error

    return otlp.OtlpSink(database(), otlp.OtlpExporter(settings.otlp_endpoint))


def _celery(_: EventSettings, __: FindEvent) -> Sink:
    from tasks.celery_app import celery
    from tasks.relay.sinks.task_events import TaskEventSink

    return TaskEventSink(celery, database())


def _require(value: str, name: str, example: str) -> None:
    if not value:
        raise InvalidSetting(f"{name} is missing, such as {example}.")


_MAKERS: Mapping[str, Callable[[EventSettings, FindEvent], Sink]] = {
    "redis": _redis,
    "kafka": _kafka,
    "nats": _nats,
    "amqp": _amqp,
    "otlp": _otlp,
    "celery": _celery,
}
