"""The checks of `slotkeeper doctor` for settings: each is valid, none contradicts another, no name is misspelled."""

import os
from collections.abc import Iterator
from difflib import get_close_matches

from pydantic_settings import BaseSettings

from app.cli.findings import Finding
from app.config import SETTINGS, AppSettings, is_loopback
from slotkeeper.errors import InvalidSetting
from tasks.config import TaskSettings

_CLIENT_VARIABLES = frozenset({"SLOTKEEPER_URL", "SLOTKEEPER_CA"})


def settings() -> Iterator[Finding]:
    """Check that each setting is valid, none contradicts another, and no name is misspelled."""
    kinds = _settings_classes()
    problems = dict.fromkeys(problem for kind in kinds for problem in _find_invalid(kind))
    for problem in problems:
        yield Finding(
            "settings", "fail", problem, "Correct it, or unset it to use its default; see docs/reference/settings.md."
        )
    known = {_variable(kind, field) for kind in kinds for field in kind.model_fields}
    variables = (name for name in os.environ if name.startswith("SLOTKEEPER_"))
    for name in sorted(set(variables) - known - _CLIENT_VARIABLES):
        similar = get_close_matches(name, known, n=1)
        remedy = "Remove it; docs/reference/settings.md lists all settings."
        if similar:
            remedy = f"Did you mean {similar[0]}?"
        yield Finding("settings", "warn", f"{name} is no setting and has no effect.", remedy)
    if not problems:
        yield from _find_contradictions()


def _settings_classes() -> list[type[BaseSettings]]:
    return list(SETTINGS.values())


def _variable(kind: type[BaseSettings], field: str) -> str:
    """Return the name of the environment variable that sets a field."""
    return f"{kind.model_config.get('env_prefix', '')}{field}".upper()


def _find_invalid(kind: type[BaseSettings]) -> Iterator[str]:
    """Yield a sentence for each invalid setting of a class, without its value."""
    try:
        kind()
    except InvalidSetting as error:
        for variable, message in error.facts["faults"]:  # type: ignore[attr-defined]
            yield f"{variable}: {message}." if variable else f"{message}."


def has_invalid_setting() -> bool:
    """Return whether a setting has a value that it cannot have."""
    return any(True for kind in _settings_classes() for _ in _find_invalid(kind))


def _find_contradictions() -> Iterator[Finding]:
    """Yield a finding for each combination of settings that does not work."""
    api, tasks, is_consistent = AppSettings(), TaskSettings(), True
    try:
        api.check_exposure()
    except InvalidSetting as error:
        is_consistent = False
        yield Finding("settings", "fail", error.detail, "The API does not start with these settings.")
    if api.metrics_key and not api.require_keys:
        is_consistent = False
        message = "SLOTKEEPER_METRICS_KEY is set but has no effect, because the API requires no keys."
        yield Finding("settings", "warn", message, "Set SLOTKEEPER_REQUIRE_KEYS=true, or unset SLOTKEEPER_METRICS_KEY.")
    if not tasks.public_url and not is_loopback(api.host):
        is_consistent = False
        message = "The API listens on the network, but servers are given 127.0.0.1 as the address to push results to."
        yield Finding(
            "settings", "warn", message, "Set SLOTKEEPER_PUBLIC_URL to the address where servers reach the API."
        )
    if is_consistent:
        yield Finding("settings", "ok", "All settings are valid, and none contradicts another.")
