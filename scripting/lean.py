"""redis-py without its own telemetry, which it loads wherever OpenTelemetry is installed: 4 MiB in each process.

Where it is not loaded, redis-py asks for it ten times with each command; that is spared, too.

For our programs, to be imported before anything imports redis.  Who uses `tasks` as a library may want that telemetry.
"""

import sys
from types import ModuleType

_TELEMETRY = "opentelemetry"


def _count_nothing(*modules: ModuleType) -> None:
    """Have what they call to be counted do nothing."""
    for module in modules:
        for name in [it for it in vars(module) if it.startswith("record_") or it == "get_pool_name"]:
            setattr(module, name, lambda *_, **__: None)


if "redis" not in sys.modules and _TELEMETRY not in sys.modules:
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # An import of it fails, which redis is prepared for.
    from redis import client, connection

    _count_nothing(client, connection)
    del sys.modules[_TELEMETRY]
