"""Settings of the workers and of the event relay."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import SettingsConfigDict

from routing.config import RoutingSettings
from slotkeeper.config import Settings
from slotkeeper.errors import InvalidSetting

Sink = Literal["redis", "kafka", "nats", "amqp", "celery", "otlp"]


class EventSettings(Settings):
    """Sinks of events.  Environment: SLOTKEEPER_EVENTS_TO, SLOTKEEPER_EVENTS_STREAM_LENGTH, …"""

    model_config = SettingsConfigDict(env_prefix="SLOTKEEPER_EVENTS_", extra="ignore")

    to: str = "redis,celery"
    """Sinks, separated by commas: `redis`, `kafka`, `nats`, `amqp`, `celery` for Celery's task events (shown by
    Flower), and `otlp` for traces; empty: none."""
    stream_length: int = Field(100_000, ge=1000, le=100_000_000)
    """Number of newest events that the stream in Redis keeps, or a few more."""
    kafka_servers: str = ""
    """Brokers of Kafka, as host:port, separated by commas."""
    kafka_topic: str = "slotkeeper.events"
    """The topic of Kafka; Slotkeeper does not create it."""
    kafka_options: dict[str, Any] = Field({}, repr=False)
    """Further options of librdkafka, as a JSON object, such as the log-in."""
    nats_url: str = Field("", repr=False)
    """URL of a NATS server with JetStream, as nats://user:password@host:4222."""
    nats_stream: str = Field("slotkeeper", pattern="^[A-Za-z0-9_-]+$")
    """The stream of NATS, created if it is missing; a subject is its name, a dot, and the event's type."""
    amqp_url: str = Field("", repr=False)
    """URL of an AMQP broker, as amqp://user:password@host:5672/vhost."""
    amqp_exchange: str = "slotkeeper.events"
    """The topic exchange, created if it is missing; the routing key is the event's type."""
    otlp_endpoint: str = Field("", repr=False)
    """URL of a receiver of OTLP over HTTP, as http://host:4318."""

    @field_validator("to")
    @classmethod
    def _check_sinks(cls, to: str) -> str:
        for name in _split_list(to):
            if name not in get_args(Sink):
                raise ValueError(f"{name!r} is no sink; there are {', '.join(get_args(Sink))}")
        return to

    @property
    def sinks(self) -> list[str]:
        return _split_list(self.to)

    @property
    def durable_sinks(self) -> list[str]:
        """Return the sinks for which an event is kept until they have received it."""
        return [sink for sink in self.sinks if sink not in ("otlp", "celery")]


def _split_list(text: str) -> list[str]:
    return list(dict.fromkeys(word for part in text.split(",") if (word := part.strip())))


def _with_certificate_check(url: str) -> str:
    """Add `ssl_cert_reqs=required` to a rediss:// URL without `ssl_cert_reqs`: Celery's result backend demands it."""
    if not url.startswith("rediss://") or "ssl_cert_reqs=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}ssl_cert_reqs=required"


class TaskSettings(Settings):
    """Environment: SLOTKEEPER_BROKER_URL, SLOTKEEPER_THREADS, …"""

    model_config = SettingsConfigDict(env_prefix="SLOTKEEPER_", extra="ignore")

    broker_url: str = ""
    """URL of a separate broker; empty: the Redis of the queue."""
    broker_queues: Literal["classic", "quorum"] = "classic"
    """Type of Slotkeeper's queues at RabbitMQ; `quorum` also if the virtual host creates quorum queues by default."""
    result_url: str = ""
    """URL of Celery's result backend; empty: the Redis of the queue."""
    threads: int = Field(1000, ge=1, le=100_000)
    """Runs that one worker process may have in flight, unless it is started with another number, `-c`."""
    secret: str = Field("", repr=False)
    """Base64 of at least 24 bytes; all keys are derived from it (tasks/security/keyring.py).  The same on every host.
    Empty: the secret is in the state folder."""
    former_secret: str = Field("", repr=False)
    """The former secret, while it is being replaced: its signatures stay valid."""
    webhook_allow: str = ""
    """Internal networks that webhooks may reach, as CIDRs, separated by commas."""
    webhook_timeout_s: float = Field(10.0, gt=0)
    """How long one try of a webhook may take."""
    webhook_most_receivers: int = Field(20, ge=0, le=100_000)
    """Webhooks that one tenant may have, in addition to the `callback_url` of its jobs."""
    webhook_keep_s: float = Field(3 * 86_400.0, ge=60)
    """How long a refused message is sent again, and how long a webhook that accepts none stays enabled."""
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(lambda level: str(level).upper())
    ] = "WARNING"
    """Lowest level of log lines of libraries; Slotkeeper logs from INFO on.  DEBUG logs everything."""
    log_format: Literal["console", "json"] = "console"
    """Format of log lines: for people, or a JSON object each."""
    require_keys: bool = False
    """Whether a request needs a key, and a message of a bare Celery client a token (docs/how-to/celery.md)."""
    key: str = Field("", repr=False)
    """With keys: the key with which this process calls `infer`, and the commands the API."""
    public_url: str = ""
    """Where inference servers reach the API for callbacks; empty: http://127.0.0.1:<port>."""
    port: int = Field(8000, ge=1, le=65535)
    """The API's port, on this machine."""
    grace_s: float = Field(20.0, ge=0)
    """How long a worker that stops waits for runs that no other worker can resume; see restarts.md."""

    @property
    def broker(self) -> str:
        """The broker's URL.  Raises InvalidSetting: Celery has no transport for it."""
        # Here, since the commands read these settings without Celery, and `up` without Redis too.
        from kombu.transport import resolve_transport

        from slotkeeper.redis.connections import explain_wrong_url

        url = self.broker_url or RoutingSettings().effective_redis_url
        try:
            resolve_transport(url.partition("://")[0])
        except (KeyError, ImportError):
            if not self.broker_url:
                raise InvalidSetting(explain_wrong_url(url)) from None
            raise InvalidSetting(
                "SLOTKEEPER_BROKER_URL names no broker that this installation can use: such as "
                "redis://:PASSWORD@host:6379/0 or amqp://USER:PASSWORD@host:5672//."
            ) from None
        return _with_certificate_check(url)

    @property
    def results(self) -> str:
        return _with_certificate_check(self.result_url or RoutingSettings().effective_redis_url)

    @property
    def callback_base(self) -> str:
        return (self.public_url or f"http://127.0.0.1:{self.port}").rstrip("/")
