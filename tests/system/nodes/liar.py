"""An agent that lies in one way: python -m tests.system.nodes.liar LIE run --config FILE."""

import json
import sys
from typing import Any

from slotkeeper import signatures
from slotkeeper.agent import node_routes
from slotkeeper.agent.__main__ import main
from slotkeeper.serve.http_server import Request, Response

_lie = sys.argv.pop(1)
_sign, _handle = node_routes.NodeRoutes._sign, node_routes.NodeRoutes.handle
_earlier: list[Any] = []


def _lying_sign(self: Any, run: Any, ending: Any, attempt: int | None) -> Any:
    envelope = _sign(self, run, ending, attempt)
    statement = signatures.RunStatement.decode(signatures.decode_bytes(envelope["payload"]))
    changes: dict[str, Any] = {
        "other_job": {"job": "another"},
        "older_attempt": {"attempt": statement.attempt - 1},
        "other_node": {"node": "n_0000"},
        "changed_result": {"result_sha256": "0" * 64},
        "changed_payload": {"payload_sha256": "0" * 64},
    }.get(_lie, {})
    if _lie == "no_envelope":
        return None
    key = signatures.make_key() if _lie == "wrong_key" else self.identity.key
    signed = signatures.sign_envelope(statement._replace(**changes).encode(), key)
    if _lie == "wrong_key":  # With the id of the true one.
        signed["signatures"][0]["keyid"] = self.identity.key_id
    return signed


def _noting_handle(self: Any, request: Request) -> Response:
    if request.path == "/run":
        (self._config.state_dir.parent / "headers.json").write_text(json.dumps(request.headers))
        if _lie == "final_error":
            return Response(500, b'{"retryable": false, "error": "no"}')
        if _lie == "final_end":
            return Response(200, b"", events=iter([b'data: {"status": "failed", "retryable": false}\n\n']))
    return _handle(self, request)


node_routes.NodeRoutes._sign = _lying_sign  # type: ignore[method-assign]
node_routes.NodeRoutes.handle = _noting_handle  # type: ignore[method-assign]
main(prog_name="liar")
