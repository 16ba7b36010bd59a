"""tasks.servers: how to speak to an inference server.  One interpreter, servers are data.

A Description says how to ask and how to read the answers; Description() is the slot protocol.
Server speaks to one server by it and gives back Outcomes.  Knows requests, pydantic and
routing.outcome; never jobs, Redis, Celery, Flask or SQL (setup.cfg, importlinter).

  description  what can be said, checked when stored     defaults   the protocol as rules
  templates    values put into a request                 rules      an answer -> an Outcome
  plan         a description compiled                     health     an answer -> a Health
  wire         one bounded HTTP exchange                  client     Server
  line         how such an exchange is cut short
"""

from tasks.servers.call import Call, Health, HealthKind
from tasks.servers.client import Server
from tasks.servers.description import DEFAULT, Description, for_model
from tasks.servers.line import Line
from tasks.servers.plan import Plan, compile_plan
from tasks.servers.rules import TOO_DEEP
from tasks.servers.wire import new_session

__all__ = [
    "DEFAULT",
    "TOO_DEEP",
    "Call",
    "Description",
    "Health",
    "HealthKind",
    "Line",
    "Plan",
    "Server",
    "compile_plan",
    "for_model",
    "new_session",
]
