"""Settings of routing: where Redis is, and how long things are held."""

from pathlib import Path

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from slotkeeper.config import StorageSettings

VALKEY_PASSWORD_FILE = "valkey-password"
"""In the state folder: what the embedded Valkey asks for."""
VALKEY_PORT_FILE = "valkey-port"
"""In the state folder: where the embedded Valkey listens."""


class RoutingSettings(BaseSettings):
    """Environment: SLOTKEEPER_REDIS_URL, SLOTKEEPER_LEASE_MS, …"""

    model_config = SettingsConfigDict(env_prefix="SLOTKEEPER_", extra="ignore")

    redis_port: int = Field(6399, ge=1, le=65535)
    """Port of the embedded Valkey.  Processes that are not given it find it in the state folder."""
    redis_url: str = ""
    """A Redis of one's own; empty: the embedded one."""
    redis_prefix: str = Field("slotkeeper", pattern=r"^[A-Za-z0-9_.:-]{1,64}$")
    """Every key begins with it, so that installations can share a Redis."""
    redis_timeout_s: float = Field(3.0, gt=0)
    """How long one call of Redis may take."""
    lease_ms: int = Field(4_000, ge=200)
    """A worker that has not renewed for this long has lost its slots."""
    renew_every_ms: int = Field(1_000, ge=50)
    """How often a worker renews its leases; under half of SLOTKEEPER_LEASE_MS, so that two in a row may be lost."""
    offer_ms: int = Field(5_000, ge=200)
    """How long an offer waits for a worker until maintenance looks at it."""
    busy_cooldown_ms: int = Field(500, ge=0)
    """A slot's cooldown after its server answered "busy" without a Retry-After; doubled each time in a row."""
    busy_cooldown_max_ms: int = Field(30_000, ge=0)
    """The longest cooldown of a slot whose server is busy, and the longest Retry-After that is honoured."""
    unreachable_cooldown_ms: int = Field(1_000, ge=1)
    """The cooldown of a server's slots when it cannot be reached; doubled each time in a row."""
    unreachable_cooldown_max_ms: int = Field(30_000, ge=1)
    """The longest cooldown of the slots of a server that cannot be reached."""
    breaker_failures: int = Field(10, ge=1)
    """Failures in a row, of different jobs, that open a server's breaker: for a while it gets no more jobs."""
    breaker_rate: float = Field(0.8, gt=0, le=1)
    """Share of a server's latest runs whose failure opens its breaker, after twenty runs."""
    breaker_open_ms: int = Field(5_000, ge=1)
    """How long a breaker is open the first time; doubled each time that a job which tries again fails."""
    breaker_open_max_ms: int = Field(300_000, ge=1)
    """How long a breaker is open at most."""
    most_constraints: int = Field(100, ge=1)
    """Different constraints of one tenant that may wait for a model; a submit beyond is answered 429."""
    most_constraints_of_all: int = Field(2_000, ge=1)
    """Different constraints of all tenants together that may wait in one fleet; a submit beyond is answered 429."""
    withhold_max_ms: int = Field(600_000, ge=0)
    """How long at most a slot is withheld whose server has not let go of a run that has ended here."""
    catalog_refresh_s: float = Field(1.0, ge=0)
    """How old a process's copy of models and servers may grow."""

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
        """The port that `slotkeeper up` has noted in `home`; the default before that."""
        try:
            return int((home / VALKEY_PORT_FILE).read_text())
        except (OSError, ValueError):
            return self.redis_port


def embedded_redis_url(port: int, home: Path) -> str:
    """Of the embedded Valkey, with the password that `slotkeeper up` keeps in `home`; without it before that."""
    try:
        password = (home / VALKEY_PASSWORD_FILE).read_text().strip()
    except OSError:
        password = ""
    return f"redis://{f':{password}@' if password else ''}127.0.0.1:{port}/0"
