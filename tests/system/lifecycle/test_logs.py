"""What clients send and servers answer stands in no log, whatever goes wrong with it."""

import json
import re

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from tests.support.http_api import HttpApi
from tools.cluster.stack import Stack, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PLANTED = "sk-PLANTED-0123456789"
OURS = ("worker", "maintenance", "beat", "web")
SHOWS_PAYLOADS = re.compile(r"PLANTED|Traceback \(most recent|^\s+File \"", re.MULTILINE)


def _servers_answers(httpserver: HTTPServer) -> None:
    """Each attempt meets another way to fail, with the prompt in it."""
    answers = iter(
        [
            Response(f"<html>{PLANTED}", 200),
            Response(json.dumps({"status": "failed", "error": f"cannot draw {PLANTED}"}), 500),
            Response('{"status": "success", "result": ' + "[" * 300 + f'"{PLANTED}"' + "]" * 300 + "}", 200),
            Response(json.dumps({"status": "failed", "error": PLANTED, "retryable": False}), 400),
        ]
    )

    def answer(_: Request) -> Response:
        return next(answers)

    httpserver.expect_request("/generate").respond_with_handler(answer)


# A client that has nothing but Celery.
_BARE = """
import json, os, sys
from celery import Celery
client = Celery(broker=os.environ["SLOTKEEPER_REDIS_URL"])
for args, options in json.load(sys.stdin):
    client.send_task("infer", args=args, queue="celery", **options)
"""


def test_no_log_shows_a_payload_whatever_fails(
    stack: Stack, api: HttpApi, server_name: str, httpserver: HTTPServer
) -> None:
    server = stack.server(server_name, 1)
    payload = {"prompt": PLANTED, "seconds": 0.01}
    api.register("logged", server, retry_backoff=0.1, retry_backoff_max=0.1)
    assert api.ended(api.submit("logged", payload))["status"] == "completed"
    assert api.ended(api.submit("logged", {**payload, "fail": "invalid"}))["status"] == "failed"
    assert api.call("POST", "/queue/submit", json={"model": PLANTED, "payload": payload}).status_code == 422
    assert api.call("POST", "/queue/submit", data=f'{{"{PLANTED}"').status_code in (400, 415)

    _servers_answers(httpserver)
    server.name, server.endpoint = f"{server_name}-b", httpserver.url_for("/generate")
    api.register("answering-anyhow", server, retry_backoff=0.1, retry_backoff_max=0.1)
    for attempts in (3, 1):
        failed = api.ended(api.submit("answering-anyhow", payload))
        assert (failed["status"], failed["attempts"]) == ("failed", attempts), "all four answers are met"

    before = stack.processes["worker"].log.count("bare_message_refused")
    messages = [[[PLANTED, payload], {}], [["logged", payload, PLANTED, 4, 5], {}], [["logged", PLANTED], {}]]
    stack.run_with_input(_BARE, json.dumps(messages))
    eventually(
        lambda: stack.processes["worker"].log.count("bare_message_refused") >= before + 3, "the messages are refused"
    )
    for name in OURS:
        found = SHOWS_PAYLOADS.search(stack.processes[name].log)
        assert found is None, f"{name}: {stack.processes[name].log[max(found.start() - 300, 0) : found.end() + 300]}"


def test_every_line_of_a_log_is_one_event_of_bounded_length(stack: Stack, api: HttpApi) -> None:
    for name in ("maintenance", "web"):
        for line in stack.processes[name].log.splitlines():
            assert len(line) <= 4000 and line.isprintable()
