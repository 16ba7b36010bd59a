"""Settings of the API and of `slotkeeper up`, and the list of all settings."""

import ssl
from functools import cached_property, lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from routing.config import RoutingSettings
from slotkeeper.config import DatabaseTimeouts, Settings, StorageSettings
from slotkeeper.errors import InvalidSetting
from tasks.config import EventSettings, TaskSettings

_MIN_METRICS_KEY = 12  # characters
_MAX_PORT = 65535

MAX_FORM_BYTES = 256 << 10
"""The largest form that the page accepts."""


class AppSettings(Settings):
    """Environment: SLOTKEEPER_HOST, SLOTKEEPER_REQUIRE_KEYS, …"""

    host: str = "127.0.0.1"
    """The address on which the API listens."""
    port: int = Field(8000, ge=1, le=65535)
    """The port on which the API listens."""
    tls_certificate: str = ""
    """The file with the certificate and its intermediate certificates, as PEM.  With it the API uses HTTPS."""
    tls_key: str = ""
    """The file with the certificate's key, as PEM.  Empty: the key is in the certificate's file."""
    require_keys: bool = False
    """Whether a request needs a key.  Without keys only requests from this machine are served."""
    metrics_key: str = Field("", repr=False)
    """With keys: a key that may read only /metrics and the stats of models.  Empty: only operators may."""
    trusted_proxies: str = ""
    """Without keys: addresses or networks of proxies whose requests are served, as CIDRs, separated by commas."""
    session_s: int = Field(43_200, ge=60, le=30 * 86_400)
    """How long a log-in to the page is valid; removing its key ends it at once."""
    max_body_bytes: int = Field(2 << 20, gt=0)
    """Largest body of a request, in bytes."""
    max_batch_bytes: int = Field(16 << 20, gt=0)
    """Largest body of a batch, in bytes."""
    max_push_bytes: int = Field(16 << 20, gt=0)
    """Largest result that a server may push, in bytes."""
    web_threads: int = Field(16, ge=1, le=2000)
    """Threads of one process that process requests; with keys, one tenant may have a quarter of them."""
    max_waiting_requests: int = Field(1024, ge=0, le=100_000)
    """Requests of one process that may wait for a job to end; with keys, one tenant may have half of them."""
    max_streams: int = Field(1024, ge=0, le=100_000)
    """Event streams that one process may have open."""
    max_tenant_streams: int = Field(256, ge=0, le=100_000)
    """With keys: event streams that one tenant may have open."""
    max_connections: int = Field(4096, ge=16, le=100_000)
    """Connections of one process; beyond this limit it closes the connection that was idle for longest."""
    max_buffered_bytes: int = Field(256 << 20, ge=32 << 20)
    """Bytes of bodies and responses that one process may hold in memory; one key or one address may have a quarter."""
    head_timeout_s: float = Field(10.0, gt=0, le=300)
    """How long a request's head may take, and how long a new connection may send nothing."""
    keep_alive_s: int = Field(30, ge=1, le=3600)
    """How long a connection may be idle between two requests."""
    body_timeout_s: float = Field(10.0, gt=0, le=300)
    """How long a body may take, plus a second for each SLOTKEEPER_BODY_MIN_RATE bytes that have arrived; then 408."""
    body_min_rate: int = Field(32 << 10, gt=0)
    """Lowest rate, in bytes per second, at which a client must send a body or read a response."""
    send_timeout_s: float = Field(10.0, gt=0, le=300)
    """How long a client may read nothing of its response."""

    @cached_property
    def own_hostnames(self) -> frozenset[str]:
        """Host names that requests may use for this machine while no keys are required."""
        return frozenset({self.host.lower().strip("[]"), urlsplit(TaskSettings().public_url).hostname or ""} - {""})

    @cached_property
    def proxies(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """Return the networks of the trusted proxies.  Raises ValueError."""
        return tuple(ip_network(part.strip()) for part in self.trusted_proxies.split(",") if part.strip())

    def is_trusted_proxy(self, address: str) -> bool:
        """Return whether a trusted proxy has this address."""
        return any(ip_address(address) in network for network in self.proxies)

    def check_exposure(self) -> None:
        """Check that the API is not open to the network without keys.  Raises InvalidSetting."""
        try:
            _ = self.proxies
        except ValueError as error:
            raise InvalidSetting(f"SLOTKEEPER_TRUSTED_PROXIES must list addresses or CIDRs: {error}.") from None
        if self.require_keys and 0 < len(self.metrics_key) < _MIN_METRICS_KEY:
            raise InvalidSetting(
                f"SLOTKEEPER_METRICS_KEY has less than {_MIN_METRICS_KEY} characters, and could be guessed: make one "
                "with openssl rand -hex 16."
            )
        if not self.require_keys and not is_loopback(self.host):
            raise InvalidSetting(
                f"SLOTKEEPER_HOST={self.host} opens the API to the network, and keys are not required: set "
                "SLOTKEEPER_REQUIRE_KEYS=true, or keep SLOTKEEPER_HOST=127.0.0.1."
            )

    def check_tls(self) -> None:
        """Check that the certificate and its key can be used.  Raises InvalidSetting."""
        if not self.tls_certificate:
            return
        for variable, path in (("TLS_CERTIFICATE", self.tls_certificate), ("TLS_KEY", self.tls_key)):
            try:
                with open(path or self.tls_certificate, "rb"):
                    pass
            except OSError as error:
                raise InvalidSetting(f"SLOTKEEPER_{variable}={path} cannot be read: {error.strerror}.") from None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_certificate, self.tls_key or None)
        except ssl.SSLError as error:
            raise InvalidSetting(
                f"SLOTKEEPER_TLS_CERTIFICATE={self.tls_certificate} and its key cannot be used "
                f"({error.reason or error}): both must be PEM, and the key must be that of the first certificate."
            ) from None


class GatewaySettings(Settings):
    """Environment: SLOTKEEPER_NODE_PORT, SLOTKEEPER_GATEWAY_ADDRESS, …"""

    node_port: int | None = Field(None, ge=0, le=65535)
    """The port to which the agents of nodes connect.  Empty: `slotkeeper up` starts no gateway; 0: any free port."""
    node_host: str = "127.0.0.1"
    """The address on which a gateway waits for agents.  They prove by their keys which nodes they are."""
    node_hosts: str = "127.0.0.1,localhost"
    """Host names under which agents dial a gateway, separated by commas.  Others are refused, so that a false gateway
    cannot pass on what an agent has signed."""
    node_max: int = Field(4000, ge=1, le=100_000)
    """Agents that may be connected to one gateway."""
    gateway_bind: str = "127.0.0.1:0"
    """Address and port on which workers reach a gateway; port 0: any free one.  It must not be public."""
    gateway_address: str = ""
    """The URL under which workers on other hosts reach this gateway.  Empty: made of SLOTKEEPER_GATEWAY_BIND."""

    @property
    def hosts(self) -> frozenset[str]:
        """Return the host names under which agents may dial a gateway."""
        return frozenset(name.strip().lower() for name in self.node_hosts.split(",") if name.strip())

    @field_validator("gateway_address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        parts = urlsplit(address)
        if address and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("give a URL such as http://gateway1:9100")
        return address.rstrip("/")

    def worker_bind(self) -> tuple[str, int]:
        """Return where workers reach the gateway.  Raises InvalidSetting."""
        host, _, port = self.gateway_bind.rpartition(":")
        if not host or not port.isdigit() or int(port) > _MAX_PORT:
            raise InvalidSetting(
                f"SLOTKEEPER_GATEWAY_BIND={self.gateway_bind} is no address with a port: 127.0.0.1:9100"
            )
        return host.strip("[]"), int(port)


class UpSettings(Settings):
    """Environment: SLOTKEEPER_FLOWER_PORT, SLOTKEEPER_DEMO_PORT."""

    flower_port: int = Field(5555, ge=1, le=65535)
    """Port of Flower's page."""
    demo_port: int | None = Field(None, ge=1, le=65533)
    """Port of the first demo server; the others have the next ports.  Empty: any free ports."""


SETTINGS: dict[str, type[Settings]] = {
    "Database and state folder": StorageSettings,
    "Time limits of the database": DatabaseTimeouts,
    "Redis, queues and slots": RoutingSettings,
    "Workers, messages and webhooks": TaskSettings,
    "The API and the page": AppSettings,
    "Nodes": GatewaySettings,
    "Sinks of events": EventSettings,
    "`slotkeeper up`": UpSettings,
}
"""All classes of settings, by the titles of their sections in the documentation."""


def local_api_url(settings: AppSettings) -> str:
    """Return the URL at which this machine reaches the API."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    scheme = "https" if settings.tls_certificate else "http"
    return f"{scheme}://[{host}]:{settings.port}" if ":" in host else f"{scheme}://{host}:{settings.port}"


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Return whether this name or address always refers to this machine."""
    name = host.lower().strip("[]")
    if name == "localhost":
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return address.is_loopback
