"""Descriptions of inference servers that come with Slotkeeper, each under a name."""

from typing import Any, Final

_PRESETS: Final[dict[str, dict[str, Any]]] = {"slot-protocol": {}}


def names() -> tuple[str, ...]:
    """The presets that there are, sorted."""
    return tuple(sorted(_PRESETS))


def get(name: str) -> dict[str, Any]:
    """A preset as Description.model_validate takes it.  Raises KeyError for a name that is none."""
    return dict(_PRESETS[name])
