"""Hooks with what schemathesis does not read from the document: the name of a model, and which fields fit together.

For its command line: SCHEMATHESIS_HOOKS=tests.support.openapi_hooks
"""

import json
from typing import Any

import schemathesis

MODEL = "zimg"
"""It must be registered."""


def fitting(body: Any, path: str) -> Any:
    """Return a body with well-formed fields, changed so that they also fit together."""
    if isinstance(body, list):
        return [fitting(one, path) for one in body]
    if not isinstance(body, dict):
        return body
    if path.startswith("/webhooks") and path.endswith("/replay"):  # It must have one of three fields.
        return {"given_up": True}
    if path.startswith("/webhooks") and "url" in body:  # It must be a public address; nothing is sent to it.
        kept = {name: value for name, value in body.items() if name not in _OF_WEBHOOKS and value is not None}
        return kept | {"url": "https://hooks.example.com/slotkeeper"}
    if "url" in body:  # of a server that is probed: no process listens there
        return {"url": "http://127.0.0.1:9"}
    if "payload" in body:
        kept = {name: value for name, value in body.items() if name not in _OF_THE_WORLD}
        return kept | {"model": MODEL, "payload": json.loads(json.dumps(body["payload"]).replace("\\u0000", ""))}
    if "endpoint" in body:
        kept = {name: value for name, value in body.items() if name not in _DESCRIBED}
        return kept | {"endpoint": "http://gpu1:9001/generate", "model": MODEL, "server": "gpu1"}
    return {name: value for name, value in body.items() if name not in _PAIRED}


_OF_THE_WORLD = frozenset({"callback_url", "ttl", "not_before", "idempotency_key", "constraints"})
_OF_WEBHOOKS = frozenset({"template", "description"})
_DESCRIBED = frozenset({"preset", "description"})
_PAIRED = (
    _DESCRIBED
    | frozenset({"poll_interval", "max_poll_time", "retry_backoff", "retry_backoff_max"})
    | frozenset(
        # Keys that are names, and paths of a server's description, whose form is not in the document.
        {"weights", "tenant_slot_limits", "poll_endpoint_template", "id_field"}
        # Only a model has a kind, which must exist.
        | {"kind"}
    )
)


@schemathesis.hook
def before_call(context: Any, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Change only bodies that are to be accepted."""
    if case.meta is not None and case.meta.generation.mode is schemathesis.GenerationMode.POSITIVE:
        case.body = fitting(case.body, case.path)
