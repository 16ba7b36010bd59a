"""Serve any Python function as an inference server (docs/reference/slot-protocol.md).

Imports nothing of Slotkeeper's jobs, Redis or database, so a model's environment needs nothing of them.
"""

from slotkeeper.serve.served_function import Canceled, Context, InvalidRequest
from slotkeeper.serve.server import ReferenceServer, ServeConfig, ServeError, serve

__all__ = ["Canceled", "Context", "InvalidRequest", "ReferenceServer", "ServeConfig", "ServeError", "serve"]
