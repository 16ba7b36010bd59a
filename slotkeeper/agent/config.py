"""The configuration of an agent: what the node offers, and when."""

import ssl
import tomllib
from dataclasses import dataclass, field
from datetime import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

_DEFAULT_MAX_PAYLOAD_MB = 16
_MODEL_FIELDS = {"function", "forward", "version", "runtime"}
_FIELDS = {
    *("gateway", "slots", "state_dir", "labels", "environment", "max_payload_mb", "max_run_s", "ca_file"),
    *("models", "hours"),
}


class InvalidConfig(Exception):
    """The configuration cannot be used; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """How a model is run: by a function `package.module:name`, or by a local server at the URL `forward`."""

    function: str | None
    forward: str | None
    version: str | None = None
    runtime: str | None = None


@dataclass(frozen=True, slots=True)
class Hours:
    """When the owner lets jobs in, by the node's local time: from one time of day until another."""

    start: time
    end: time

    def includes(self, now: time) -> bool:
        """Return whether jobs are let in at this time of day."""
        if self.start <= self.end:
            return self.start <= now < self.end
        return now >= self.start or now < self.end


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The configuration of an agent."""

    gateway: str
    """The URL to dial: wss://…, or ws:// on the same machine."""
    models: dict[str, ModelEntry]
    state_dir: Path
    slots: int = 1
    labels: dict[str, str | float] = field(default_factory=dict)
    environment: str | None = None
    max_payload_bytes: int = _DEFAULT_MAX_PAYLOAD_MB << 20
    max_run_s: float = 7 * 86_400.0
    """So long a local server may go on with a run after the agent was restarted."""
    ca_file: str | None = None
    hours: Hours | None = None

    @property
    def host(self) -> str:
        """The host name that is dialed."""
        return (urlsplit(self.gateway).hostname or "").lower()

    def declaration(self) -> bytes:
        """Return what the node declares, as JSON."""
        models = {
            name: {
                key: value
                for key, value in (("model_version", entry.version), ("runtime", entry.runtime))
                if value is not None
            }
            for name, entry in sorted(self.models.items())
        }
        declared: dict[str, Any] = {"models": models, "slots": self.slots, "labels": self.labels}
        if self.environment is not None:
            declared["environment"] = self.environment
        return orjson.dumps(declared, option=orjson.OPT_SORT_KEYS)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the context for wss; None: the connection is not encrypted.  Raises InvalidConfig."""
        if not self.gateway.startswith("wss:"):
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise InvalidConfig(f"ca_file {self.ca_file} cannot be read: {error}") from None


def read_config(path: Path) -> AgentConfig:
    """Read the configuration from a TOML file.  Raises InvalidConfig."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} is no TOML: {error}") from None
    try:
        return _parse(data, path)
    except InvalidConfig as error:
        raise InvalidConfig(f"{path}: {error}") from None


def _parse(data: dict[str, Any], path: Path) -> AgentConfig:
    if unknown := sorted(data.keys() - _FIELDS):
        raise InvalidConfig(f"{unknown[0]}: there is no such field; there are: {', '.join(sorted(_FIELDS))}")
    gateway = _get(data, "gateway", str)
    parts = urlsplit(gateway)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise InvalidConfig("gateway: give a URL such as wss://nodes.example.com")
    models = _get(data, "models", dict)
    if not models:
        raise InvalidConfig('models: add at least one, such as [models.zimg] with function = "module:name"')
    slots = _get(data, "slots", int, 1)
    if slots < 1:
        raise InvalidConfig("slots: at least 1")
    labels = _get(data, "labels", dict, {})
    for name, value in labels.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise InvalidConfig(f"labels.{name}: a text or a number")
    return AgentConfig(
        gateway=gateway,
        models={name: _parse_model(name, entry) for name, entry in models.items()},
        state_dir=path.parent / _get(data, "state_dir", str, "agent-state"),
        slots=slots,
        labels=labels,
        environment=_get(data, "environment", str, None),
        max_payload_bytes=_get(data, "max_payload_mb", int, _DEFAULT_MAX_PAYLOAD_MB) << 20,
        max_run_s=float(_get(data, "max_run_s", int, 7 * 86_400)),
        ca_file=_get(data, "ca_file", str, None),
        hours=_parse_hours(data["hours"]) if "hours" in data else None,
    )


def _parse_model(name: str, entry: Any) -> ModelEntry:
    if not isinstance(entry, dict) or (unknown := sorted(entry.keys() - _MODEL_FIELDS)):
        what = "it must be a table" if not isinstance(entry, dict) else f"{unknown[0]}: there is no such field"
        raise InvalidConfig(f"models.{name}: {what}")
    function, forward = _get(entry, "function", str, None), _get(entry, "forward", str, None)
    if (function is None) == (forward is None):
        raise InvalidConfig(f"models.{name}: give either function or forward")
    if forward is not None and (urlsplit(forward).scheme not in ("http", "https") or not urlsplit(forward).hostname):
        raise InvalidConfig(f"models.{name}.forward: give a URL such as http://127.0.0.1:8000/generate")
    return ModelEntry(function, forward, _get(entry, "version", str, None), _get(entry, "runtime", str, None))


def _parse_hours(entry: Any) -> Hours:
    try:
        return Hours(time.fromisoformat(entry["from"]), time.fromisoformat(entry["to"]))
    except (KeyError, TypeError, ValueError):
        raise InvalidConfig('hours: give from = "18:00" and to = "08:00"') from None


_REQUIRED: Any = object()


def _get(data: dict[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = data.get(name, default)
    if value is _REQUIRED:
        raise InvalidConfig(f"{name}: it is missing")
    if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
        raise InvalidConfig(f"{name}: it must be of the type {kind.__name__}")
    return value
