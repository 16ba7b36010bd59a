"""The plan of a simulation: its load and its fleet, from the command line or a file.

Durations are seconds, or texts such as "90s", "15m", "24h", "7d".  Times are relative to the start of the simulation.
"""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from app.simulate.scenario import SimulationError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_MAX_DURATION_S = 366 * 86_400.0


def parse_duration_s(value: object) -> object:
    """Return a duration in seconds.  Raises ValueError if the text is not a duration."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a duration; write seconds, or 90s, 15m, 24h, 7d")
    return float(match[1]) * _UNITS_S[match[2] or "s"]


Duration = Annotated[float, BeforeValidator(parse_duration_s), Field(ge=0, le=_MAX_DURATION_S, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelPlan(_Part):
    """A model, how long its jobs run, and how it is configured."""

    name: Name
    share: Share = 1.0
    """Relative share of the arrivals."""
    mean: Annotated[Duration, Field(gt=0)] = 20.0
    spread: float = Field(1.0, ge=0, le=20)
    """Standard deviation of the run times, as a multiple of their mean."""
    shape: Literal["lognormal", "exponential"] = "lognormal"
    deadline: Duration = 0.0
    """Time from the arrival of a job to its deadline; 0: no deadline."""
    config: dict[str, Any] = {}
    """Configuration, as for PUT /admin/model-configs."""


class ServerPlan(_Part):
    """A server.  `models` empty: it serves all models."""

    name: Name
    slots: int = Field(ge=1, le=100_000)
    models: list[Name] = []


class Burst(_Part):
    """Additional jobs of one tenant within a duration.  `tenant` None: a random one.  `model` None: random models."""

    at: Duration
    jobs: int = Field(ge=1, le=10_000_000)
    lasts: Duration = 300.0
    tenant: str | None = None
    model: Name | None = None


class Down(_Part):
    """An outage of a server."""

    server: Name
    at: Duration
    lasts: Annotated[Duration, Field(gt=0)] = 600.0


class Plan(_Part):
    """The parameters of a generated scenario."""

    seed: int = 1
    duration: Annotated[Duration, Field(gt=0)] = 86_400.0
    """How long jobs arrive, from the start."""
    busy: float = Field(0.9, gt=0, le=1000)
    """Arriving work as a multiple of the capacity of the slots; above 1 the backlog grows."""
    rate: float | None = Field(None, gt=0)
    """Jobs per hour, instead of `busy`."""
    swing: float = Field(0.0, ge=0, le=1)
    """Amplitude of the daily variation of the rate, as a share of its mean."""
    peak: Duration = 14 * 3600.0
    """Time of day when the rate is highest."""
    tenants: int = Field(20, ge=1, le=1_000_000)
    zipf: float = Field(1.0, ge=0, le=5)
    """The n-th tenant submits 1 / n^zipf times as many jobs as the first."""
    shares: dict[str, Share] = {}
    """Tenant -> its share of the arrivals, instead of `tenants` and `zipf`."""
    priorities: dict[Annotated[int, Field(ge=1, le=9)], Share] = {1: 1.0, 5: 8.0, 9: 1.0}
    """Priority -> its share of the arrivals."""
    models: list[ModelPlan] = [ModelPlan(name="demo")]
    servers: list[ServerPlan] = []
    """Empty: two servers with eight slots for each model."""
    bursts: list[Burst] = []
    bursts_per_day: float = Field(0.0, ge=0, le=10_000)
    burst_jobs: int = Field(200, ge=1, le=10_000_000)
    outages: list[Down] = []
    outages_per_day: float = Field(0.0, ge=0, le=1000)
    """Random outages of each server."""
    outage_lasts: Annotated[Duration, Field(gt=0)] = 600.0
    start_latency: Duration = 0.0
    swap: Duration = 0.0
    """Time that a server needs to load another model."""

    @model_validator(mode="after")
    def _check_names(self) -> "Plan":
        if not self.models or not self.priorities:
            raise ValueError("a load needs at least one model and one priority")
        models = {model.name for model in self.models}
        servers = {server.name for server in self.fleet()}
        if len(models) < len(self.models) or len(servers) < len(self.fleet()):
            raise ValueError("two models, or two servers, have the same name")
        used = {name for server in self.servers for name in server.models} | {b.model for b in self.bursts if b.model}
        if unknown := sorted(used - models):
            raise ValueError(f"there is no model {unknown[0]!r} among {', '.join(sorted(models))}")
        if unknown := sorted({down.server for down in self.outages} - servers):
            raise ValueError(f"there is no server {unknown[0]!r} among {', '.join(sorted(servers))}")
        if idle := sorted(models - {name for server in self.fleet() for name in server.models}):
            raise ValueError(f"no server serves {idle[0]!r}")
        return self

    def fleet(self) -> list[ServerPlan]:
        """Return the servers, each with the models that it serves."""
        all_models = [model.name for model in self.models]
        if self.servers:
            return [
                server if server.models else server.model_copy(update={"models": all_models}) for server in self.servers
            ]
        return [ServerPlan(name=f"{model}-gpu{n}", slots=8, models=[model]) for model in all_models for n in (1, 2)]


def read_plan(file: Path | None, changes: dict[str, Any]) -> Plan:
    """Return the plan in a TOML or JSON file, or the default plan, with changed fields.  Raises SimulationError."""
    fields = {} if file is None else _read_fields(file)
    try:
        return Plan(**{**fields, **changes})
    except ValidationError as error:
        raise SimulationError(f"{file or 'The load'} is not valid: {describe_first_error(error)}.") from None


def describe_first_error(error: ValidationError) -> str:
    """Return the first error and its field, as a text."""
    fault = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    return f"{field}: {message[:1].lower()}{message[1:]}" if field else message


def _read_fields(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text("utf-8")
        fields = orjson.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise SimulationError(f"{file} cannot be read ({error}): name a file that exists.") from None
    except ValueError as error:
        kind = "JSON" if file.suffix == ".json" else "TOML"
        raise SimulationError(
            f"{file} is not {kind} ({error}): correct it, or give it the suffix .toml or .json that fits."
        ) from None
    if not isinstance(fields, dict):
        raise SimulationError(f"{file} holds no object: write the fields that docs/how-to/simulator.md lists.")
    return fields
