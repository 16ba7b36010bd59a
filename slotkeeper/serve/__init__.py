"""Any Python function behind the slot protocol (docs/slot-protocol.md).

`engine` decides and knows no HTTP; `runner` calls the function (`model`), which may speak in `pieces`; `http_server`
speaks HTTP and knows no jobs; `door` stands between them, with `answers` and `guard`; `push` tells an end by itself;
`server` puts it all together.  `demo` only pretends, `gated` waits until it may go on; `journal` and `logs` are
written, `exact` reads numbers of any length, and writes `files` as JSON.
  Imports nothing of jobs, routing, tasks or app (setup.cfg, importlinter).
"""

from slotkeeper.serve.served_function import Canceled, Context, InvalidRequest
from slotkeeper.serve.server import ReferenceServer, ServeConfig, ServeError, serve

__all__ = ["Canceled", "Context", "InvalidRequest", "ReferenceServer", "ServeConfig", "ServeError", "serve"]
