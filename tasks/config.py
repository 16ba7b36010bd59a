"""Settings of the workers."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from routing.config import RoutingSettings

Sink = Literal["redis", "kafka", "nats", "amqp", "celery", "otlp"]


class EventSettings(BaseSettings):
    """Where events are published to.  Environment: SLOTKEEPER_EVENTS_TO, SLOTKEEPER_EVENTS_STREAM_LENGTH, …"""

    model_config = SettingsConfigDict(env_prefix="SLOTKEEPER_EVENTS_", extra="ignore")

    to: str = "redis,celery"
    """Sinks, with commas: `redis`, `kafka`, `nats`, `amqp`, `celery` for Celery's task events, which Flower shows, and
    `otlp` for traces; empty: none."""
    stream_length: int = Field(100_000, ge=1000, le=100_000_000)
    """So many of the newest events the stream in Redis keeps, or a few more."""
    kafka_servers: str = ""
    """Brokers of Kafka, as host:port with commas."""
    kafka_topic: str = "slotkeeper.events"
    """The topic; it is not created here."""
    kafka_options: dict[str, Any] = Field({}, repr=False)
    """More of librdkafka's own settings, as a JSON object: how to log in, for one."""
    nats_url: str = Field("", repr=False)
    """A NATS server with JetStream, as nats://user:password@host:4222."""
    nats_stream: str = Field("slotkeeper", pattern="^[A-Za-z0-9_-]+$")
    """The stream, made where there is none; subjects are its name, a dot, and the event's type."""
    amqp_url: str = Field("", repr=False)
    """An AMQP broker, as amqp://user:password@host:5672/vhost."""
    amqp_exchange: str = "slotkeeper.events"
    """The exchange, of the kind topic, made where there is none; the routing key is the event's type."""
    otlp_endpoint: str = Field("", repr=False)
    """A receiver of OTLP over HTTP, as http://host:4318."""

    @field_validator("to")
    @classmethod
    def _known(cls, to: str) -> str:
        for name in _words(to):
            if name not in get_args(Sink):
                raise ValueError(f"{name!r} is no sink; there are {', '.join(get_args(Sink))}")
        return to

    @property
    def sinks(self) -> list[str]:
        return _words(self.to)

    @property
    def durable_sinks(self) -> list[str]:
        """Those that each event is kept for until they have got it.  The others show jobs while these are here."""
        return [it for it in self.sinks if it not in ("otlp", "celery")]


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word for part in text.split(",") if (word := part.strip())))


def _with_certificate_check(url: str) -> str:
    """Add `ssl_cert_reqs=required` to a rediss:// URL without `ssl_cert_reqs`: Celery's result backend demands it."""
    if not url.startswith("rediss://") or "ssl_cert_reqs=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}ssl_cert_reqs=required"


class TaskSettings(BaseSettings):
    """Environment: SLOTKEEPER_BROKER_URL, SLOTKEEPER_THREADS, …"""

    model_config = SettingsConfigDict(env_prefix="SLOTKEEPER_", extra="ignore")

    broker_url: str = ""
    """A broker of one's own; empty: the Redis of the waiting room."""
    broker_queues: Literal["classic", "quorum"] = "classic"
    """The type of our queues at RabbitMQ; `quorum` also where the virtual host makes quorum queues by default."""
    result_url: str = ""
    """Celery's result backend; empty: the Redis of the waiting room."""
    threads: int = Field(1000, ge=1, le=100_000)
    """Runs that one worker process may have in flight, unless it is started with a number of its own, `-c`."""
    secret: str = Field("", repr=False)
    """Base64 of at least 24 bytes, from which all keys are derived (tasks/security/keyring.py); the same on every host.
    Empty: one is kept in the state folder."""
    former_secret: str = Field("", repr=False)
    """The secret before this one, while it is being replaced: what it has signed is still valid."""
    webhook_allow: str = ""
    """Networks inside that webhooks may reach, as CIDRs with commas."""
    webhook_timeout_s: float = Field(10.0, gt=0)
    """How long one try of a webhook may take."""
    webhook_most_receivers: int = Field(20, ge=0, le=100_000)
    """Webhooks that one tenant may have, beside the `callback_url` of its jobs."""
    webhook_keep_s: float = Field(3 * 86_400.0, ge=60)
    """How long a webhook is tried with a message that it refuses, and stays enabled if it takes none."""
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(lambda it: str(it).upper())
    ] = "WARNING"
    """From which on the lines of libraries are logged; ours always are from INFO on.  DEBUG leaves nothing out."""
    log_format: Literal["console", "json"] = "console"
    """How lines of logs are written: for people, or each as a JSON object."""
    public_url: str = ""
    """Where inference servers reach us for callbacks; empty: http://127.0.0.1:<port>."""
    port: int = Field(8000, ge=1, le=65535)
    """The API's port, on this machine."""
    grace_s: float = Field(20.0, ge=0)
    """How long a worker that was told to stop waits for runs that no other can resume; see restarts.md."""

    @property
    def broker(self) -> str:
        return _with_certificate_check(self.broker_url or RoutingSettings().effective_redis_url)

    @property
    def results(self) -> str:
        return _with_certificate_check(self.result_url or RoutingSettings().effective_redis_url)

    @property
    def callback_base(self) -> str:
        return (self.public_url or f"http://127.0.0.1:{self.port}").rstrip("/")
