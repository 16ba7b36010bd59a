"""Settings of the workers."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from routing.config import RoutingSettings


class TaskSettings(BaseSettings):
    """Environment: SLOTKEEPER_BROKER_URL, SLOTKEEPER_THREADS, …"""

    model_config = SettingsConfigDict(env_prefix="SLOTKEEPER_", extra="ignore")

    broker_url: str = ""
    """A broker of one's own; empty: the Redis of the waiting room."""
    result_url: str = ""
    """Celery's result backend; empty: the Redis of the waiting room."""
    threads: int = Field(1000, ge=1, le=100_000)
    """Runs that one worker process may have in flight."""
    secret: str = Field("", repr=False)
    """Base64 of at least 24 bytes, from which all keys are derived (tasks/keyring.py); the same on every host.
    Empty: one is kept in the state folder."""
    former_secret: str = Field("", repr=False)
    """The secret before this one, while it is being replaced: what it has signed is still valid."""
    webhook_allow: str = ""
    """Networks inside that webhooks may reach, as CIDRs with commas."""
    webhook_timeout_s: float = Field(10.0, gt=0)
    """How long one try of a webhook may take."""
    webhook_max_tries: int = Field(12, ge=1)
    """Tries of one webhook: the last comes about a day after the first."""
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(lambda it: str(it).upper())
    ] = "WARNING"
    """From which on the lines of libraries are logged; ours always are from INFO on.  DEBUG leaves nothing out."""
    public_url: str = ""
    """Where inference servers reach us for callbacks; empty: http://127.0.0.1:<port>."""
    port: int = Field(8000, ge=1, le=65535)
    """The API's port, on this machine."""
    grace_s: float = Field(20.0, ge=0)
    """How long a worker that is told to stop waits for its jobs before it hands them back."""

    @property
    def broker(self) -> str:
        return self.broker_url or RoutingSettings().room_url

    @property
    def results(self) -> str:
        return self.result_url or RoutingSettings().room_url

    @property
    def callback_base(self) -> str:
        return (self.public_url or f"http://127.0.0.1:{self.port}").rstrip("/")
