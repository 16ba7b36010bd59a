"""What schemathesis cannot know: which model there is, and how fields of one body hang together.

For its command line: SCHEMATHESIS_HOOKS=tests.support.openapi_hooks
"""

import json
from typing import Any

import schemathesis

MODEL = "zimg"
"""It must be registered."""


def fitting(body: Any, path: str) -> Any:
    """A body whose parts are well-formed, made into one whose parts also fit together."""
    if isinstance(body, list):
        return [fitting(one, path) for one in body]
    if not isinstance(body, dict):
        return body
    if path.startswith("/webhooks") and path.endswith("/replay"):  # It names one of three.
        return {"given_up": True}
    if path.startswith("/webhooks") and "url" in body:  # It must be a public address; nothing is sent to it.
        kept = {name: value for name, value in body.items() if name not in _OF_WEBHOOKS and value is not None}
        return kept | {"url": "https://hooks.example.com/slotkeeper"}
    if "url" in body:  # of a server that is probed: nobody listens there
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
        # Keys that are names, and paths that a server's description must be made of: the document does not say how.
        {"weights", "tenant_slot_limits", "poll_endpoint_template", "id_field"}
        # Only a model is of a kind, and of one that there is.
        | {"kind"}
    )
)


@schemathesis.hook
def before_call(context: Any, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """What is meant to be refused stays as it is."""
    if case.meta is not None and case.meta.generation.mode is schemathesis.GenerationMode.POSITIVE:
        case.body = fitting(case.body, case.path)
