"""Settings of the record, and what is configured for each model."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class RecordSettings(BaseSettings):
    """Where the record lies.  Environment: SLOTKEEPER_HOME, SLOTKEEPER_DATABASE_URL, …"""

    model_config = SettingsConfigDict(env_prefix="SLOTKEEPER_", extra="ignore")

    home: Path = Path("var")
    """The one folder that holds all state of an embedded installation."""
    database_url: str = ""
    """An SQLAlchemy URL; empty: SQLite in `home`."""
    idempotency_window_s: int = Field(86_400, gt=0)
    """How long an Idempotency-Key names the same job (R22)."""
    retention_s: int = Field(30 * 86_400, gt=0)
    """How long an ended job, dead ones included, stays in the record."""

    @property
    def record_url(self) -> str:
        return self.database_url or f"sqlite:///{(self.home / 'record.db').absolute()}"


Policy = Literal["fifo", "priority"]


class ModelConfig(BaseModel):
    """How jobs of one model are treated.  Defaults are those of system S1 (R84) where it had them.

    An override of any field is stored in the record and takes effect everywhere within two seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model_type: Literal["sync", "async"] = "sync"
    """sync: the server answers at once; async: with an id to be polled."""
    poll_endpoint_template: Annotated[str, Field(max_length=500)] | None = None
    """Path of the status request, with `{id}`; null: `/status/{id}`."""
    id_field: Annotated[str, Field(max_length=100)] | None = None
    """Where an async answer carries its id; null: `job_id`."""
    poll_interval: float = Field(2.0, gt=0, le=3600)
    """Seconds between two polls."""
    max_poll_time: float = Field(600.0, gt=0, le=7 * 86_400)
    """Seconds that one run may take in all, sync or async."""
    max_retries: int = Field(50, ge=0, le=10_000)
    """Wrong answers of a server before the job is set aside as dead."""
    max_crashes: int = Field(3, ge=1, le=100)
    """Deaths of a worker or server under the job before it is quarantined as dead."""
    retry_backoff: float = Field(1.0, gt=0, le=3600)
    """Seconds before the first retry; doubled each time."""
    retry_backoff_max: float = Field(30.0, gt=0, le=86_400)
    """Seconds that no single wait exceeds, before jitter of ±10 %."""
    max_payload_bytes: int = Field(1 << 20, gt=0, le=64 << 20)
    """Largest payload, as compact JSON."""
    max_waiting: int | None = Field(None, ge=0)
    """Queued jobs beyond which a submit is answered 429; null: no bound."""
    default_ttl: float | None = Field(None, gt=0, le=366 * 86_400)
    """Seconds after which a job without its own `ttl` expires; null: never."""
    policy: Policy = "priority"
    """Whose turn it is: `priority` by (tier, acceptance), `fifo` by acceptance alone."""

    @model_validator(mode="after")
    def _relations(self) -> "ModelConfig":
        template = self.poll_endpoint_template
        if template is not None and (not template.startswith("/") or "{id}" not in template):
            raise ValueError("poll_endpoint_template must be a path that starts with / and contains {id}")
        if self.poll_interval > self.max_poll_time:
            raise ValueError("poll_interval must not exceed max_poll_time")
        if self.retry_backoff > self.retry_backoff_max:
            raise ValueError("retry_backoff must not exceed retry_backoff_max")
        return self
