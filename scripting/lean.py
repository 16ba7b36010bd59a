"""redis-py without its own telemetry, which it loads wherever OpenTelemetry is installed: 4 MiB in each process.

For our programs, to be imported before anything imports redis.  Who uses `tasks` as a library may want that telemetry.
"""

import sys

_TELEMETRY = "opentelemetry"

if "redis" not in sys.modules and _TELEMETRY not in sys.modules:
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # An import of it fails, which redis is prepared for.
    import redis  # noqa: F401

    del sys.modules[_TELEMETRY]
