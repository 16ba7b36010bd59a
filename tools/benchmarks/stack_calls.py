"""Submit jobs to an installation, or read it: python -m tools.benchmarks.stack_calls NAME [ARGUMENT ...].

The process has the settings of the installation.  NAME is a function of this module.  Benchmarks use `call`, which
runs such a process with `Stack.run`.
"""

import json
import sys
from typing import Any

from routing.admission.job_request import JobRequest
from routing.admission.submission import Submission
from routing.maintenance.rebuild import refresh_fleet
from slotkeeper import logs
from slotkeeper.clock import now_ms
from slotkeeper.jobs import ledger
from slotkeeper.registry.identity import LOCAL_IDENTITY
from tasks.services import catalog, dispatcher, leases
from tools.cluster.stack import Stack

_AT_ONCE = 500


def call(stack: Stack, name: str, *arguments: object) -> Any:
    """Call a function of this module in a new process, with the settings of `stack`; return its result."""
    arguments_json = [json.dumps(argument) for argument in arguments]
    return json.loads(stack.run([sys.executable, "-m", "tools.benchmarks.stack_calls", name, *arguments_json]))


def queue_then_serve(model: str, jobs: int, seconds: float, url: str, slots: int) -> None:
    """Submit jobs of `seconds` each, and then register a server for them."""
    catalog().configure(model, {}, now_ms())
    _submit([JobRequest(model=model, payload={"seconds": seconds}) for _ in range(jobs)])
    catalog().register(model, model, url, slots, now_ms())
    refresh_fleet(dispatcher(), model)


def serve_polled(model: str, jobs: int, poll_interval_s: int, url: str) -> None:
    """Register a server with a slot for each job, and submit jobs that are polled."""
    catalog().configure(model, {"poll_interval": poll_interval_s, "max_poll_time": 36_000}, now_ms())
    catalog().register(model, model, url, jobs, now_ms())
    refresh_fleet(dispatcher(), model)
    _submit([JobRequest(model=model, payload={"n": n}) for n in range(jobs)])


def _submit(requests: list[JobRequest]) -> None:
    for start in range(0, len(requests), _AT_ONCE):
        dispatcher().submit([Submission(request) for request in requests[start : start + _AT_ONCE]], LOCAL_IDENTITY)


def read_leases() -> tuple[int, int, int]:
    """Return how many leases there are, the age of the oldest (ms), and how long a lease lasts (ms)."""
    leases_by_fleet = leases().list_all(dispatcher().catalog.get().fleets())
    ages = [age for held in leases_by_fleet.values() for _, age in held]
    return len(ages), max(ages, default=0), dispatcher().settings.lease_ms


def count_states() -> dict[str, int]:
    """Return how many jobs are in each state."""
    counts = ledger.count_by_state(dispatcher().store.database)
    return {state.value: count for state, count in counts.items()}


_FUNCTIONS = {function.__name__: function for function in (queue_then_serve, serve_polled, read_leases, count_states)}

if __name__ == "__main__":
    logs.configure()  # to stderr: stdout has the result
    name, *arguments_json = sys.argv[1:]
    json.dump(_FUNCTIONS[name](*map(json.loads, arguments_json)), sys.stdout)
