"""structlog as our processes use it: without rich, which it loads for consoles of developers.  6 MiB in each process.

To be imported before anything imports structlog.  Who wants rich for something else still finds it.
"""

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # An import of it fails, which structlog is prepared for.
    import structlog  # noqa: F401

    del sys.modules["rich"]
