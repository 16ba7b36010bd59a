"""Settings of the record: where it lies, and how long it may keep anybody waiting."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class DatabaseTimeouts(BaseSettings):
    """How long the record may keep anybody waiting, in seconds.  Environment: SLOTKEEPER_DATABASE_TURN_S, …

    A write is answered within `turn_s + transaction_s + inquiry_s`, whatever the database does.
    """

    model_config = SettingsConfigDict(env_prefix="SLOTKEEPER_DATABASE_", extra="ignore", frozen=True)

    turn_s: float = Field(2.5, gt=0)
    """How long a write waits for those before it; then it is refused, and nothing of it was stored."""
    transaction_s: float = Field(4.0, ge=2)  # A new connection is given two seconds at least.
    """How long a transaction takes until its COMMIT is answered (PostgreSQL)."""
    inquiry_s: float = Field(2.5, ge=2)
    """How long is asked what became of a COMMIT that was not answered."""
    lock_s: float = Field(3.0, ge=0)
    """How long is waited for a lock that another transaction holds; 0: no limit (PostgreSQL), no wait (SQLite)."""
    read_s: float = Field(8.0, gt=0)
    """How long a read takes that a request waits for (PostgreSQL)."""
    statement_s: float = Field(30.0, ge=0)
    """How long any statement takes, counts of all jobs included (PostgreSQL); 0: no limit."""
    idle_s: float = Field(15.0, ge=0)
    """How long a transaction may stand still before the server ends it (PostgreSQL); 0: no limit."""


class StorageSettings(BaseSettings):
    """Where the record lies.  Environment: SLOTKEEPER_HOME, SLOTKEEPER_DATABASE_URL, …"""

    model_config = SettingsConfigDict(env_prefix="SLOTKEEPER_", extra="ignore")

    home: Path = Path("var")
    """The one folder that holds all state of an embedded installation."""
    database_url: str = ""
    """An SQLAlchemy URL, such as postgresql://user@host/name; empty: SQLite in the state folder."""
    idempotency_window_s: int = Field(86_400, gt=0)
    """How long an Idempotency-Key names the same job."""
    retention_s: int = Field(30 * 86_400, gt=0)
    """How long an ended job, dead ones included, stays in the record."""
    events_retention_s: int = Field(90 * 86_400, gt=0)
    """How long an event stays in the record; and as long as its job, and until all sinks have got it."""
    acts_retention_s: int = Field(400 * 86_400, gt=0)
    """How long an act of an operator stays there."""

    @property
    def sqlalchemy_url(self) -> str:
        return self.database_url or f"sqlite:///{(self.home / 'record.db').absolute()}"
