"""Settings of routing: the address of Redis, and the durations of leases, cooldowns and breakers."""

from pathlib import Path

from pydantic import Field, model_validator

from slotkeeper.config import Settings, StorageSettings

VALKEY_PASSWORD_FILE = "valkey-password"
"""In the state folder: the password of the embedded Valkey."""
VALKEY_PORT_FILE = "valkey-port"
"""In the state folder: the port on which the embedded Valkey listens."""


class RoutingSettings(Settings):
    """Environment: SLOTKEEPER_REDIS_URL, SLOTKEEPER_LEASE_MS, …"""

    redis_port: int = Field(6399, ge=1, le=65535)
    """Port of the embedded Valkey.  Processes without this setting read the port from the state folder."""
    redis_url: str = ""
    """URL of a separate Redis; empty: the embedded Valkey."""
    redis_prefix: str = Field("slotkeeper", pattern=r"^[A-Za-z0-9_.:-]{1,64}$")
    """Prefix of every key, so that several installations can share a Redis."""
    redis_timeout_s: float = Field(3.0, gt=0)
    """How long one request to Redis may take."""
    lease_ms: int = Field(4_000, ge=200)
    """A worker loses its slots if it has not renewed its leases for this time."""
    renew_every_ms: int = Field(1_000, ge=50)
    """How often a worker renews its leases; under half of SLOTKEEPER_LEASE_MS, so that one renewal may be lost."""
    offer_ms: int = Field(5_000, ge=200)
    """How long an offer waits for a worker until maintenance checks it."""
    busy_cooldown_ms: int = Field(500, ge=0)
    """Cooldown of a slot after its server answered "busy" without a Retry-After; doubled each time in a row."""
    busy_cooldown_max_ms: int = Field(30_000, ge=0)
    """Longest cooldown of a slot of a busy server, and longest Retry-After that is obeyed."""
    unreachable_cooldown_ms: int = Field(1_000, ge=1)
    """Cooldown of a server's slots when it cannot be reached; doubled each time in a row."""
    unreachable_cooldown_max_ms: int = Field(30_000, ge=1)
    """Longest cooldown of the slots of a server that cannot be reached."""
    breaker_failures: int = Field(10, ge=1)
    """Consecutive failures, of different jobs, that open a server's breaker, so that it gets no jobs for a while."""
    breaker_rate: float = Field(0.8, gt=0, le=1)
    """Share of failed runs among a server's latest runs that opens its breaker, after twenty runs."""
    breaker_open_ms: int = Field(5_000, ge=1)
    """How long a breaker is open the first time; doubled each time the job that tests the server fails."""
    breaker_open_max_ms: int = Field(300_000, ge=1)
    """Longest time for which a breaker is open."""
    most_constraints: int = Field(100, ge=1)
    """Different constraints of one tenant that may wait for a model; a further submit gets 429."""
    most_constraints_of_all: int = Field(2_000, ge=1)
    """Different constraints of all tenants together that may wait in one fleet; a further submit gets 429."""
    withhold_max_ms: int = Field(600_000, ge=0)
    """Longest time for which a slot is quarantined because its server may still run a job that has ended."""
    validation_max_wrong: float = Field(0.2, gt=0, le=1)
    """Share of wrong answers to validations, of its last 20 and at least 5, at which a server is drained."""
    batch_open_s: float = Field(86_400.0, gt=0)
    """An open batch that has received no line for this time is closed."""
    catalog_refresh_s: float = Field(1.0, ge=0)
    """Longest age of a process's copy of models and servers."""

    @model_validator(mode="after")
    def _relations(self) -> "RoutingSettings":
        if self.renew_every_ms * 2 >= self.lease_ms:
            raise ValueError("SLOTKEEPER_RENEW_EVERY_MS must be under half of SLOTKEEPER_LEASE_MS")
        return self

    @property
    def effective_redis_url(self) -> str:
        if self.redis_url:
            return self.redis_url
        home = StorageSettings().home
        return embedded_redis_url(
            self.redis_port if "redis_port" in self.model_fields_set else self._saved_port(home), home
        )

    def _saved_port(self, home: Path) -> int:
        """Return the port that `slotkeeper up` wrote to `home`, or the default if it has not."""
        try:
            return int((home / VALKEY_PORT_FILE).read_text())
        except (OSError, ValueError):
            return self.redis_port


def embedded_redis_url(port: int, home: Path) -> str:
    """Return the URL of the embedded Valkey, with the password if `slotkeeper up` has written one to `home`."""
    try:
        password = (home / VALKEY_PASSWORD_FILE).read_text().strip()
    except OSError:
        password = ""
    return f"redis://{f':{password}@' if password else ''}127.0.0.1:{port}/0"
