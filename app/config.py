"""Settings of the door."""

from functools import cached_property, lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from tasks.config import TaskSettings


class AppSettings(BaseSettings):
    """Environment: SLOTKEEPER_HOST, SLOTKEEPER_REQUIRE_KEYS, …"""

    model_config = SettingsConfigDict(env_prefix="SLOTKEEPER_", extra="ignore")

    host: str = "127.0.0.1"
    """The address that is listened on."""
    port: int = Field(8000, ge=1, le=65535)
    require_keys: bool = False
    """Whether a request must show a tenant's key.  Without keys only this machine is served."""
    key_cache_s: float = Field(5.0, ge=0, le=300)
    """How long a key that was looked up is not looked up again; a removed one works this long at most."""
    max_body_bytes: int = Field(2 << 20, gt=0)
    """Largest body of a request."""
    max_batch_bytes: int = Field(16 << 20, gt=0)
    """Largest body of a batch."""
    max_push_bytes: int = Field(16 << 20, gt=0)
    """Largest result that a server may push."""
    web_threads: int = Field(64, ge=1, le=2000)
    """Threads that answer requests in one process."""

    @property
    def max_waiters(self) -> int:
        """Requests of one process that may wait for a job to end: half of its threads stay free."""
        return self.web_threads // 2

    @cached_property
    def own_names(self) -> frozenset[str]:
        """Host names under which this machine may be addressed while no keys are asked for."""
        return frozenset({self.host.lower().strip("[]"), urlsplit(TaskSettings().public_url).hostname or ""} - {""})

    def check(self) -> None:
        """Raises ValueError where the settings would open the door to strangers."""
        if not self.require_keys and not is_loopback(self.host):
            raise ValueError(
                f"SLOTKEEPER_HOST={self.host} opens the API to the network, and keys are not required: set "
                "SLOTKEEPER_REQUIRE_KEYS=true, or keep SLOTKEEPER_HOST=127.0.0.1"
            )


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    """Whether this name or address can only mean this very machine."""
    name = host.lower().strip("[]")
    if name == "localhost":
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return address.is_loopback
