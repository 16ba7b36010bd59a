"""A Redis user with the rights that the document names is enough for all processes."""

import re
import sys
from pathlib import Path

from tests.support.http_api import HttpApi
from tools.cluster.stack import REPO, Stack, eventually

_RULES = re.compile(r"^ACL SETUSER slotkeeper (.*)$", re.MULTILINE)
_BY_CELERY = (
    "from tasks.inference import infer; "
    "print(infer.delay('zimg', {'prompt': 'a cat'}).get(timeout=60)); "
    "print(infer.app.control.ping(timeout=5))"
)


def test_a_redis_user_with_the_rights_of_the_document_is_enough(tmp_path: Path) -> None:
    (rules,) = _RULES.findall((REPO / "docs/reference/dependencies.md").read_text())
    with Stack(tmp_path) as stack:
        assert stack.valkey is not None
        with stack.valkey.client() as redis:
            redis.execute_command("ACL", "SETUSER", "slotkeeper", *rules.replace(">PASSWORD", ">secret").split())
            stack.env["SLOTKEEPER_REDIS_URL"] = stack.valkey.url.replace("//", "//slotkeeper:secret@")
            for start in (stack.maintenance, stack.beat, stack.worker, stack.webhooks, stack.relay, stack.web):
                start()
            api, server = HttpApi(stack), stack.server("gpu", 2)
            api.register("zimg", server)
            eventually(
                lambda: api.call("GET", "/health/ready").json()["status"] == "ok", "a canary came through", within_s=60
            )
            assert api.ended(api.submit("zimg", {"prompt": "a dog"}))["status"] == "completed"
            output = stack.run([sys.executable, "-c", _BY_CELERY])
            assert "a cat" in output and "pong" in output
            assert redis.execute_command("ACL", "LOG") == []
