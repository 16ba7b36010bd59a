"""An inference server for any Python function (docs/reference/slot-protocol.md).

The package imports neither Redis, SQLAlchemy nor the rest of Slotkeeper, so a model's environment does not need them.
"""

from slotkeeper.serve.served_function import Canceled, Context, InvalidRequest
from slotkeeper.serve.server import ReferenceServer, ServeConfig, ServeError, serve

__all__ = ["Canceled", "Context", "InvalidRequest", "ReferenceServer", "ServeConfig", "ServeError", "serve"]
