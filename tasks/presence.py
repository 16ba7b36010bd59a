"""What a worker says of itself from when it first takes jobs: that it lives, what it runs, how its canaries fare."""

from typing import Any, Protocol

from foundation.once import once
from tasks import alive
from tasks.canary import Canary, listen
from tasks.wiring import processes, workers
from tasks.worker.engine import Engine


class Shows(Protocol):
    """What is told of a worker."""

    engine: Engine
    capacity: int

    @property
    def runs(self) -> int: ...
    @property
    def takes(self) -> bool: ...


_shown: list[Shows] = []


def show(worker: Shows, consumer: Any) -> None:
    """Have the worker take canaries by this consumer of Celery's, and say from now on how it fares."""
    _shown[:] = [worker]
    listen(_canary(), consumer)
    _begin()


@once
def _canary() -> Canary:
    return Canary(_shown[0].engine, workers())


@once
def _begin() -> alive.Alive:
    return alive.begin("worker", processes(), _facts)


def _facts() -> dict[str, Any]:
    worker, canary = _shown[0], _canary()
    canary.send_in_time()
    return {"runs": worker.runs, "capacity": worker.capacity, "takes": worker.takes, **canary.facts()}
