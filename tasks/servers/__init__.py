"""How an inference server is called: a description (data) is compiled, requests are sent, responses are judged.

Description() is the slot protocol.  A `ServerAdapter` is one server and its description, and a
`ServerSession` calls it and returns Outcomes.
"""

from tasks.servers.adapter import ServerAdapter
from tasks.servers.compiled import CompiledDescription, compile_description
from tasks.servers.description import DEFAULT, Description, from_shorthand
from tasks.servers.http_client import SPOOL_AFTER_BYTES, HttpClient
from tasks.servers.rules import TOO_DEEP
from tasks.servers.session import ServerSession, call_server
from tasks.servers.values import Health, HealthKind, RunDetails

__all__ = [
    "DEFAULT",
    "SPOOL_AFTER_BYTES",
    "TOO_DEEP",
    "CompiledDescription",
    "Description",
    "Health",
    "HealthKind",
    "HttpClient",
    "RunDetails",
    "ServerAdapter",
    "ServerSession",
    "call_server",
    "compile_description",
    "from_shorthand",
]
