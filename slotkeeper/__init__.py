"""Slotkeeper's library; `Client` and `infer` for users, both imported when they are first used."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slotkeeper.client import Client

infer: Any
"""The Celery task: `infer.delay(model, payload)`."""

__all__ = ["Client", "infer"]


def __getattr__(name: str) -> Any:
    """Import lazily: a process that needs one module of this package loads neither requests nor Celery."""
    if name == "Client":
        from slotkeeper.client import Client

        return Client
    if name == "infer":
        return _import_infer()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _import_infer() -> Any:
    """Return the Celery task, unless another module `tasks`, such as the user's own file, hides Slotkeeper's."""
    import importlib

    tasks = importlib.import_module("tasks")
    found = Path(str(tasks.__file__)).resolve()
    if found.parent.parent != Path(__file__).resolve().parents[1]:
        raise ImportError(
            f"{found} hides Slotkeeper's package `tasks`: rename it, or use slotkeeper.Client, which needs no Celery."
        )
    return tasks.infer
