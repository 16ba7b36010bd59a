"""tasks.servers: how to speak to an inference server.  One interpreter, servers are data.

A Description says how to ask and how to read the answers; Description() is the slot protocol.
Server speaks to one server by it and gives back Outcomes.  Knows httptools, pydantic and
routing.dispatch.outcome; never jobs, Redis, Celery, Flask or SQL (setup.cfg, importlinter).

  description  what can be said, checked when stored     defaults   the protocol as rules
  templates    values put into a request                 rules      an answer -> an Outcome
  plan         a description compiled                     health     an answer -> a Health
  wires        bounded HTTP exchanges, in an event loop   client     Server
  connection   one connection of those                    live       Server, spoken to from there
  call         what goes into an exchange                 answers    what came back
  stream       an answer that comes in pieces          inspection  one that is large, in a process
  body         a large answer, in a file
  pointers, patterns, paths  safe ways to read and to ask
  presets      descriptions that come with Slotkeeper, by name
  probe        what answers at an address, asked and told
"""

from tasks.servers.adapter import ServerAdapter
from tasks.servers.body import SPOOL_AFTER_BYTES
from tasks.servers.call import Call, Health, HealthKind
from tasks.servers.compiled import CompiledDescription, compile_description
from tasks.servers.description import DEFAULT, Description, from_shorthand
from tasks.servers.http_client import HttpClient
from tasks.servers.live import ServerSession, call_server
from tasks.servers.rules import TOO_DEEP

__all__ = [
    "DEFAULT",
    "SPOOL_AFTER_BYTES",
    "TOO_DEEP",
    "Call",
    "CompiledDescription",
    "Description",
    "Health",
    "HealthKind",
    "HttpClient",
    "ServerAdapter",
    "ServerSession",
    "call_server",
    "compile_description",
    "from_shorthand",
]
