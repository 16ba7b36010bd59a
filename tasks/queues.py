"""Which queues a worker takes messages from is for its command line to say, and not for Celery's remote control.

A button in Flower, or anybody at the broker, could else stop maintenance for all, without a word, until a restart.
"""

from typing import Any

from celery.worker import control

_UNCHANGED = "nothing was changed: a worker's queues are those of its command line; stop it, or start another"


@control.control_command(name="cancel_consumer", args=[("queue", str)], signature="<queue>")
def cancel_consumer(state: Any, queue: Any = None, **_: Any) -> dict[str, Any]:
    """Not done: what no worker takes is waited for by all."""
    return {"ok": _UNCHANGED}


@control.control_command(name="add_consumer", args=[("queue", str)], signature="<queue> [exchange [type [key]]]")
def add_consumer(state: Any, queue: Any = None, **_: Any) -> dict[str, Any]:
    """Not done: a worker of jobs would take maintenance's messages, and the other way round."""
    return {"ok": _UNCHANGED}
