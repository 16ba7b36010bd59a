"""How settings are read, and the settings of the database: its location and its time limits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from slotkeeper.errors import InvalidSetting, SlotkeeperError


class Settings(BaseSettings):
    """Settings that are read from the environment when an object is created.  Raises InvalidSetting."""

    model_config = SettingsConfigDict(env_prefix="SLOTKEEPER_", extra="ignore")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _invalid_setting(type(self), error) from None
        except SettingsError as error:  # It quotes the name of the field, and not its value.
            field = str(error).partition('"')[2].partition('"')[0]
            variable = f"{self.model_config.get('env_prefix', '')}{field}".upper()
            faults = [(variable, "it is not JSON")]
            raise InvalidSetting(f"{variable} is wrong: it is not JSON.", faults=faults) from None


def _invalid_setting(settings: type[BaseSettings], error: ValidationError) -> InvalidSetting:
    """Return an error that names each variable, with its value if that cannot contain a secret.

    Its fact `faults` is a list of (variable or "", message), without values.
    """
    sentences, faults = [], []
    prefix = str(settings.model_config.get("env_prefix", ""))
    for fault in error.errors(include_url=False):
        message = str(fault["msg"]).removeprefix("Value error, ")
        if not fault["loc"]:
            sentences.append(f"{message}.")
            faults.append(("", message))
            continue
        name = str(fault["loc"][0]).lower().removeprefix(prefix.lower())
        field, variable = settings.model_fields.get(name), f"{prefix}{name}".upper()
        value = f"={fault['input']!r}" if field is not None and field.annotation in (int, float, bool) else ""
        sentences.append(f"{variable}{value} is wrong: {message}.")
        faults.append((variable, message))
    return InvalidSetting(" ".join(sentences), faults=faults)


@contextmanager
def exit_if_refused() -> Iterator[None]:
    """End the process with status 1 and one line, if a setting, the state folder, Redis or the secret is refused."""
    try:
        yield
    except (SlotkeeperError, OSError) as error:
        raise SystemExit(f"Error: {error}") from error


class DatabaseTimeouts(Settings):
    """Time limits of the database, in seconds.  Environment: SLOTKEEPER_DATABASE_TURN_S, …

    On PostgreSQL, a write returns or fails within `turn_s + transaction_s + inquiry_s`.  On SQLite, the wait for the
    disk has no limit.
    """

    model_config = SettingsConfigDict(env_prefix="SLOTKEEPER_DATABASE_", extra="ignore", frozen=True)

    turn_s: float = Field(2.5, gt=0)
    """How long a write waits for the writes before it.  After this it is refused, and nothing of it was stored."""
    transaction_s: float = Field(4.0, ge=2)  # A new connection is given two seconds at least.
    """How long a transaction may take until the database confirms its COMMIT (PostgreSQL)."""
    inquiry_s: float = Field(2.5, ge=2)
    """How long the outcome of a COMMIT without a response is queried."""
    lock_s: float = Field(3.0, ge=0)
    """How long a transaction waits for a lock of another one; 0: no limit (PostgreSQL), no wait (SQLite)."""
    read_s: float = Field(8.0, gt=0)
    """How long a read of a waiting request may take (PostgreSQL)."""
    statement_s: float = Field(30.0, ge=0)
    """How long any statement may take, also a count of all jobs (PostgreSQL); 0: no limit."""
    idle_s: float = Field(15.0, ge=0)
    """How long a transaction may be idle before the database ends it (PostgreSQL); 0: no limit."""

    @property
    def commit_s(self) -> float:
        """How long a transaction may take, until its outcome is known or was queried for long enough."""
        return self.transaction_s + self.inquiry_s

    @property
    def request_s(self) -> float:
        """How long all steps of a client's request may take together: a write, and a second for all before it."""
        return self.turn_s + self.commit_s + 1.0


class StorageSettings(Settings):
    """Location and retention of the database.  Environment: SLOTKEEPER_HOME, SLOTKEEPER_DATABASE_URL, …"""

    home: Path = Path("var")
    """The folder with the whole state of an embedded installation."""
    database_url: str = ""
    """An SQLAlchemy URL, such as postgresql://user@host/name; empty: SQLite in the state folder."""
    idempotency_window_s: int = Field(86_400, gt=0)
    """How long an Idempotency-Key identifies the same job."""
    retention_s: int = Field(30 * 86_400, gt=0)
    """How long an ended job stays in the database, also a dead one."""
    events_retention_s: int = Field(90 * 86_400, gt=0)
    """How long an event stays in the database.  It stays longer if its job does, or if a sink has not received it."""
    acts_retention_s: int = Field(400 * 86_400, gt=0)
    """How long an act of an operator stays in the database."""
    transfers_retention_s: int = Field(400 * 86_400, gt=0)
    """How long each transfer of credits stays in the database; older ones are added up by kind."""

    @field_validator("database_url")
    @classmethod
    def _check_database_url(cls, url: str) -> str:
        backend, separator, _ = url.partition("://")
        if url and not separator:
            raise ValueError("it is no SQLAlchemy URL, such as postgresql://user@host/name")
        if url and backend.partition("+")[0] not in ("sqlite", "postgresql"):
            raise ValueError(f"the database can be sqlite or postgresql, and not {backend}")
        return url

    @property
    def sqlalchemy_url(self) -> str:
        return self.database_url or f"sqlite:///{(self.home / 'record.db').absolute()}"
