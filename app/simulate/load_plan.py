"""A load and a fleet in few words: what the command line, or a file, asks for.

Lengths of time are seconds, or texts like "90s", "15m", "24h", "7d"; moments count from the beginning.
"""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from app.simulate.scenario import SimulationError

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_LONGEST_S = 366 * 86_400.0


def parse_duration_s(value: object) -> object:
    """A length of time in seconds.  Raises ValueError for a text that is none."""
    if not isinstance(value, str):
        return value
    found = _SPAN.fullmatch(value.strip())
    if found is None:
        raise ValueError(f"{value!r} is no length of time; write seconds, or 90s, 15m, 24h, 7d")
    return float(found[1]) * _UNITS_S[found[2] or "s"]


Span = Annotated[float, BeforeValidator(parse_duration_s), Field(ge=0, le=_LONGEST_S, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelPlan(_Part):
    """A model, how long its jobs run, and how it is configured."""

    name: Name
    share: Share = 1.0
    """Of the arrivals."""
    mean: Annotated[Span, Field(gt=0)] = 20.0
    spread: float = Field(1.0, ge=0, le=20)
    """Standard deviation of the run times, as a multiple of their mean."""
    shape: Literal["lognormal", "exponential"] = "lognormal"
    deadline: Span = 0.0
    """How long after its arrival a job's deadline is; 0: it has none."""
    config: dict[str, Any] = {}
    """As PUT /admin/model-configs takes it."""


class ServerPlan(_Part):
    """A server.  `models` empty: it serves all."""

    name: Name
    slots: int = Field(ge=1, le=100_000)
    models: list[Name] = []


class Burst(_Part):
    """So many jobs more, within a length of time, by one tenant for one model; None: a random one."""

    at: Span
    jobs: int = Field(ge=1, le=10_000_000)
    lasts: Span = 300.0
    tenant: str | None = None
    model: Name | None = None


class Down(_Part):
    """A server is gone for a while."""

    server: Name
    at: Span
    lasts: Annotated[Span, Field(gt=0)] = 600.0


class Plan(_Part):
    """Everything that a generated scenario is made from."""

    seed: int = 1
    duration: Annotated[Span, Field(gt=0)] = 86_400.0
    """How long jobs arrive."""
    busy: float = Field(0.9, gt=0, le=1000)
    """Work that arrives, as a multiple of what the slots can do: above 1 the backlog grows."""
    rate: float | None = Field(None, gt=0)
    """Jobs per hour, instead of `busy`."""
    swing: float = Field(0.0, ge=0, le=1)
    """How much the rate rises by day and falls by night, as a share of its mean."""
    peak: Span = 14 * 3600.0
    """When in the day it is highest."""
    tenants: int = Field(20, ge=1, le=1_000_000)
    zipf: float = Field(1.0, ge=0, le=5)
    """The n-th tenant asks for 1 / n^zipf of what the first asks for."""
    shares: dict[str, Share] = {}
    """Tenant -> its share of the arrivals, instead of `tenants` and `zipf`."""
    priorities: dict[Annotated[int, Field(ge=1, le=9)], Share] = {1: 1.0, 5: 8.0, 9: 1.0}
    """Priority -> its share of the arrivals."""
    models: list[ModelPlan] = [ModelPlan(name="demo")]
    servers: list[ServerPlan] = []
    """None: two of eight slots for each model."""
    bursts: list[Burst] = []
    bursts_per_day: float = Field(0.0, ge=0, le=10_000)
    burst_jobs: int = Field(200, ge=1, le=10_000_000)
    outages: list[Down] = []
    outages_per_day: float = Field(0.0, ge=0, le=1000)
    """Of each server."""
    outage_lasts: Annotated[Span, Field(gt=0)] = 600.0
    start_latency: Span = 0.0
    swap: Span = 0.0
    """What loading another model costs a server."""

    @model_validator(mode="after")
    def _relations(self) -> "Plan":
        if not self.models or not self.priorities:
            raise ValueError("a load needs at least one model and one priority")
        models = {model.name for model in self.models}
        servers = {server.name for server in self.fleet()}
        if len(models) < len(self.models) or len(servers) < len(self.fleet()):
            raise ValueError("two models, or two servers, have the same name")
        asked = {name for server in self.servers for name in server.models} | {b.model for b in self.bursts if b.model}
        if strange := sorted(asked - models):
            raise ValueError(f"there is no model {strange[0]!r} among {', '.join(sorted(models))}")
        if strange := sorted({down.server for down in self.outages} - servers):
            raise ValueError(f"there is no server {strange[0]!r} among {', '.join(sorted(servers))}")
        if idle := sorted(models - {name for server in self.fleet() for name in server.models}):
            raise ValueError(f"no server serves {idle[0]!r}")
        return self

    def fleet(self) -> list[ServerPlan]:
        """The servers, each with the models that it serves."""
        everything = [model.name for model in self.models]
        if self.servers:
            return [
                server if server.models else server.model_copy(update={"models": everything}) for server in self.servers
            ]
        return [ServerPlan(name=f"{model}-gpu{n}", slots=8, models=[model]) for model in everything for n in (1, 2)]


def read_plan(file: Path | None, changes: dict[str, Any]) -> Plan:
    """The plan of a TOML or JSON file, or the default one, with some fields changed.  Raises Wrong."""
    found = {} if file is None else _content(file)
    try:
        return Plan(**{**found, **changes})
    except ValidationError as error:
        raise SimulationError(f"{file or 'The load'} is not understood: {describe_first_error(error)}.") from None


def describe_first_error(error: ValidationError) -> str:
    """The first thing that is wrong, and where."""
    fault = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    what = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {what[:1].lower()}{what[1:]}" if where else what


def _content(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text("utf-8")
        found = orjson.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise SimulationError(f"{file} cannot be read ({error}): name a file that exists.") from None
    except ValueError as error:
        kind = "JSON" if file.suffix == ".json" else "TOML"
        raise SimulationError(
            f"{file} is not {kind} ({error}): correct it, or name it .toml or .json as it is."
        ) from None
    if not isinstance(found, dict):
        raise SimulationError(f"{file} holds no object: write the fields that docs/how-to/simulator.md lists.")
    return found
