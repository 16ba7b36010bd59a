"""Server adapters: the requests that they make from a description, and the outcomes of responses and failures."""

import gzip
import json
import socket
import threading
import time
from typing import Any

import pytest

from routing.dispatch.outcome import Outcome, OutcomeKind
from slotkeeper import json_text, large_json
from tasks.servers import Description, HealthKind, RunDetails, ServerAdapter, http_connection
from tasks.servers.responses import Response
from tests.support.scripted import Scripted, always, answer, hang_up, refused_url, reset

DONE = {"status": "success", "result": {"image": "x"}}
_TIMES_OUT_WITHIN_S = 15  # A busy machine may notice a deadline of 0.3 s late; without it, the call never ends.
TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def make_call(**fields) -> RunDetails:
    return RunDetails(**{"job_id": "job-1", "attempt": 2, "payload": {"prompt": "cat"}, "deadline_s": 5.0, **fields})


@pytest.fixture
def start_server(scripted, ours):
    """Return a function that starts an HTTP server and returns an adapter of it, and the server itself."""

    def start(act, description=None, **options) -> tuple[Any, Scripted]:
        http_server = scripted(act)
        return ours(http_server.url + "/generate", description or Description(), **options), http_server

    return start


def describe(**steps) -> Description:
    return Description.model_validate(steps)


# -- requests --------------------------------------------------------------------------------------


def test_a_submit_sends_the_payload_and_the_headers_of_its_job(start_server):
    server, http_server = start_server(always(answer(DONE)))
    call = make_call(callback_url="http://me/cb", callback_token="tok", traceparent=TRACE)
    assert server.submit(call) == Outcome(OutcomeKind.DONE, result={"image": "x"})
    (seen,) = http_server.seen
    assert (seen.method, seen.path, seen.json) == ("POST", "/generate", {"prompt": "cat"})
    expected = {
        "x-source": "dispatcher",
        "x-job-id": "job-1",
        "x-attempt": "2",
        "idempotency-key": "job-1",
        "x-callback-url": "http://me/cb",
        "x-callback-token": "tok",
        "traceparent": TRACE,
        "content-type": "application/json",
        "accept-encoding": "identity",
    }
    assert expected.items() <= seen.headers.items()


def test_a_header_without_a_valid_value_is_not_sent(start_server):
    server, http_server = start_server(always(answer(DONE)))
    server.submit(make_call(traceparent="bad\r\nX-Evil: 1"))
    assert not {"x-callback-url", "x-callback-token", "traceparent", "x-evil"} & http_server.seen[0].headers.keys()


@pytest.mark.parametrize("payload", [None, [], "text", 0, {"seed": 2**70}])
def test_any_json_value_is_a_payload(start_server, payload):
    server, http_server = start_server(always(answer(DONE)))
    server.submit(make_call(payload=payload))
    assert json.loads(http_server.seen[0].body) == payload


def test_a_payload_that_is_not_json_fails_the_job_and_is_not_sent(start_server):
    server, http_server = start_server(always(answer(DONE)))
    outcome = server.submit(make_call(payload={"x": object()}))
    assert (outcome.kind, outcome.code, http_server.connections) == (OutcomeKind.FAILED, "bad_payload", 0)


def test_the_templates_of_a_request_are_filled(start_server):
    submit = {
        "path": "/v1/{{raw:payload/model}}/predict",
        "method": "PUT",
        "headers": {"Authorization": "Bearer {{secret/KEY}}"},
        "body": {"id": "{{job/attempt_id}}", "input": "{{payload/input}}", "webhook": "{{callback_url}}"},
    }
    server, http_server = start_server(always(answer(DONE)), describe(submit=submit), secret={"KEY": "s3cret"}.get)
    server.submit(make_call(payload={"model": "org/m", "input": {"n": 1}}, callback_url="http://me/cb"))
    (seen,) = http_server.seen
    assert (seen.method, seen.path) == ("PUT", "/v1/org/m/predict")
    assert seen.headers["authorization"] == "Bearer s3cret"
    assert seen.json == {"id": "job-1-2", "input": {"n": 1}, "webhook": "http://me/cb"}


def test_a_secret_that_the_server_quotes_is_masked(start_server):
    submit = {"headers": {"Authorization": "Bearer {{secret/KEY}}"}}
    refusal = answer({"error": "s3cret is not valid, nor is tok-9"}, 401)
    server, _ = start_server(always(refusal), describe(submit=submit), secret={"KEY": "s3cret"}.get)
    outcome = server.submit(make_call(callback_token="tok-9"))
    assert outcome.message == "the server answered 401: *** is not valid, nor is ***"


def test_a_missing_secret_sends_nothing(start_server):
    server, http_server = start_server(always(answer(DONE)), describe(submit={"headers": {"A": "{{secret/KEY}}"}}))
    outcome = server.submit(make_call())
    assert (outcome.kind, outcome.code, http_server.connections) == (OutcomeKind.RETRY, "misconfigured", 0)


def test_a_proxy_of_the_environment_is_not_used(start_server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", refused_url())
    monkeypatch.setenv("http_proxy", refused_url())
    server, _ = start_server(always(answer(DONE)))
    assert server.submit(make_call()).kind is OutcomeKind.DONE


def test_cookies_are_not_kept(start_server):
    server, http_server = start_server(always(answer(DONE, 200, Set_Cookie="a=b")))
    server.submit(make_call())
    server.submit(make_call())
    assert "cookie" not in http_server.seen[1].headers


@pytest.mark.parametrize("endpoint", ["", "gpu1:9001/x", "ftp://h/x", "http:///x", "http://h:99999/x", "http://h/\n"])
def test_an_endpoint_that_is_not_an_http_url_is_refused(endpoint):
    with pytest.raises(ValueError):
        ServerAdapter(endpoint)


# -- failures: may the server have the request? ----------------------------------------------------


def test_a_refused_connection_is_unreachable(ours):
    outcome = ours(refused_url() + "/generate").submit(make_call())
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNREACHABLE, "connect_failed")


def test_a_host_without_an_address_is_unreachable(ours):
    assert ours("http://nowhere.invalid:1/x").submit(make_call()).kind is OutcomeKind.UNREACHABLE


def test_a_connection_that_takes_too_long_is_unreachable(ours, silent_address):
    description = describe(submit={"connect_s": 0.1})
    assert ours(f"http://127.0.0.2:{silent_address}/x", description).submit(make_call()).kind is OutcomeKind.UNREACHABLE


def test_a_tls_handshake_that_fails_is_unreachable(scripted, ours):
    http_server = scripted(always(hang_up))
    url = http_server.url.replace("http://", "https://")
    assert ours(url + "/x").submit(make_call()).kind is OutcomeKind.UNREACHABLE
    assert http_server.seen == []


def test_a_tls_handshake_that_hangs_is_unreachable(ours):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/x"
        outcome = ours(url).submit(make_call(deadline_s=0.2))
    assert outcome.kind is OutcomeKind.UNREACHABLE


def test_without_time_left_nothing_is_sent(start_server):
    server, http_server = start_server(always(answer(DONE)))
    assert server.submit(make_call(deadline_s=0.0)).kind is OutcomeKind.UNREACHABLE
    assert http_server.connections == 0


def test_a_silent_server_leaves_the_outcome_unknown(start_server):
    server, http_server = start_server(lambda _seen: lambda _sock: http_server.stopped.wait())
    outcome = server.submit(make_call(deadline_s=0.2))
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNKNOWN, "no_answer")


def test_the_read_timeout_of_a_step_applies_before_the_deadline(start_server):
    server, http_server = start_server(lambda _: lambda _: http_server.stopped.wait(), describe(submit={"read_s": 0.1}))
    started = time.monotonic()
    assert server.submit(make_call(deadline_s=60.0)).code == "no_answer"
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("act", [reset, hang_up], ids=["reset", "closed"])
def test_a_connection_lost_after_sending_leaves_the_outcome_unknown(start_server, act):
    server, http_server = start_server(always(act))
    outcome = server.submit(make_call())
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNKNOWN, "connection_lost")
    assert len(http_server.seen) == 1, "the client does not send it again"


@pytest.mark.parametrize(
    "beginning",
    [
        answer(DONE)[:-5],
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"sta\r\n',
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"220 smtp.example.com\r\n",
    ],
    ids=["body", "headers", "chunk", "bad chunk", "two lengths", "no http"],
)
@pytest.mark.parametrize("end", [reset, hang_up], ids=["reset", "closed"])
def test_half_an_answer_leaves_the_outcome_unknown(start_server, beginning, end):
    server, _ = start_server(lambda _seen: lambda sock: (sock.sendall(beginning), end(sock)))
    assert server.submit(make_call()).kind is OutcomeKind.UNKNOWN


def trickle(get_server, beginning: bytes, piece: bytes):
    """Respond with this beginning, and then with the piece again and again until the server is stopped."""

    def act(_seen):
        def send(sock):
            sock.sendall(beginning)
            while not get_server().stopped.wait(0.01):
                sock.sendall(piece)

        return send

    return act


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["length", "chunks", "until closed", "headers", "continue"],
)
def test_a_trickle_is_cut_at_the_deadline(start_server, beginning, piece):
    server, http_server = start_server(trickle(lambda: http_server, beginning, piece))
    started = time.monotonic()
    outcome = server.submit(make_call(deadline_s=0.2))
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNKNOWN, "no_answer")
    assert time.monotonic() - started < _TIMES_OUT_WITHIN_S


def test_a_server_that_does_not_read_times_out_at_the_deadline(scripted, ours):
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        started = time.monotonic()
        outcome = ours(url).submit(make_call(payload="x" * 30_000_000, deadline_s=0.3))
    assert outcome.kind is OutcomeKind.UNKNOWN and time.monotonic() - started < _TIMES_OUT_WITHIN_S


def test_a_server_that_stops_reading_a_kept_connection_times_out_at_the_deadline(start_server):
    server, http_server = start_server(
        lambda _seen: lambda sock: (sock.sendall(answer(DONE)), http_server.stopped.wait())
    )
    assert server.submit(make_call(deadline_s=60)).kind is OutcomeKind.DONE
    started = time.monotonic()
    outcome = server.submit(make_call(payload="x" * 30_000_000, deadline_s=0.3))
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNKNOWN, "no_answer")
    assert time.monotonic() - started < _TIMES_OUT_WITHIN_S


def test_the_connect_timeout_does_not_limit_the_sending_of_a_payload(start_server):
    server, _ = start_server(always(answer(DONE)), describe(submit={"connect_s": 0.05}))
    assert server.submit(make_call(payload="x" * 60_000_000, deadline_s=20)).kind is OutcomeKind.DONE


def test_a_header_that_cannot_be_encoded_costs_a_retry_and_is_not_sent(start_server):
    server, http_server = start_server(always(answer(DONE)))
    outcome = server.submit(make_call(callback_url="http://me/\u4e2d"))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "misconfigured")
    assert http_server.seen == []


def test_an_infinite_deadline_is_accepted(start_server):
    server, _ = start_server(always(answer(DONE)))
    assert server.submit(make_call(deadline_s=float("inf"))).kind is OutcomeKind.DONE


# -- responses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"status":"success","result":NaN}'], ids=["empty", "html", "nan"])
def test_an_invalid_response_body_costs_a_retry(start_server, body):
    server, _ = start_server(always(answer(body, 200, Content_Type="application/json")))
    outcome = server.submit(make_call())
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "bad_answer")


def test_a_redirect_is_not_followed(start_server, scripted):
    target = scripted(always(answer(DONE)))
    server, _ = start_server(always(answer(b"", 307, Location=target.url + "/x")))
    outcome = server.submit(make_call(deadline_s=5))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "bad_answer")
    assert target.connections == 0


def test_a_key_of_the_endpoint_that_the_server_quotes_is_masked(scripted, ours):
    http_server = scripted(
        lambda seen: answer({"error": f"no route for {seen.path} (token abc/def-1 is unknown)"}, 400)
    )
    server = ours(http_server.url + "/generate?v=2&token=abc%2Fdef-1", Description())
    message = server.submit(make_call()).message
    assert "abc" not in message
    assert "v=2&token=***" in message


def test_the_size_of_a_redirects_body_is_limited(start_server):
    server, _ = start_server(always(answer(b"x" * 5000, 302, Location="/x")), max_response_bytes=1000)
    assert server.submit(make_call()).code == "answer_too_large"


def chunked(*pieces: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def gzipped(body: bytes) -> bytes:
    return answer(gzip.compress(body), 200, Content_Encoding="gzip")


@pytest.mark.parametrize(
    "act",
    [
        answer(b'"' + b"x" * 5000 + b'"'),
        chunked(*[b"x" * 500] * 10),
        lambda sock: (sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000), hang_up(sock)),
        gzipped(b"x" * 5000),
    ],
    ids=["length", "chunks", "until closed", "compressed"],
)
def test_a_response_that_exceeds_the_size_limit_fails_the_job(start_server, act):
    server, _ = start_server(always(act), max_response_bytes=1000)
    outcome = server.submit(make_call(deadline_s=2))
    assert (outcome.kind, outcome.code) == (OutcomeKind.FAILED, "answer_too_large")


def test_a_response_whose_content_length_is_too_large_is_not_read(start_server):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"
    server, http_server = start_server(lambda _seen: lambda sock: (sock.sendall(head), http_server.stopped.wait()))
    assert server.submit(make_call(deadline_s=30)).code == "answer_too_large"


@pytest.mark.parametrize(
    "act", [chunked(b'{"status":', b'"done","result":1}'), gzipped(b'{"status":"done","result":1}')]
)
def test_chunked_and_compressed_responses_are_read(start_server, act):
    server, _ = start_server(always(act))
    assert server.submit(make_call()).result == 1


def test_a_large_result_within_the_limit_is_read(start_server):
    server, _ = start_server(always(answer({"status": "done", "result": "x" * 3_000_000})))
    assert json_text.dumps(server.submit(make_call()).result) == b'"' + b"x" * 3_000_000 + b'"'


def test_a_response_above_4_mib_is_parsed_in_a_subprocess(start_server, monkeypatch):
    server, _ = start_server(always(answer({"status": "done", "result": ["x" * 5_000_000]})))
    monkeypatch.setattr(large_json, "parse", lambda _: pytest.fail("parsed in this process"))
    result = server.submit(make_call()).result
    assert isinstance(result, json_text.RawJson) and result.size == len(result.text) == 5_000_004


def test_a_response_above_4_mib_that_is_not_json_is_a_bad_answer(start_server):
    server, _ = start_server(always(answer(b'{"status":"done","result":[' + b"[]," * 2_000_000)))
    assert server.submit(make_call()).code == "bad_answer"


def test_a_busy_outcome_has_the_retry_after_of_the_server(start_server):
    server, _ = start_server(always(answer({"error": "full"}, 503, Retry_After="7")))
    outcome = server.submit(make_call())
    assert (outcome.kind, outcome.retry_after_s) == (OutcomeKind.BUSY, 7.0)


# -- connections -----------------------------------------------------------------------------------


def test_connections_are_kept(start_server):
    server, http_server = start_server(always(answer(DONE)))
    for _ in range(3):
        server.submit(make_call())
    assert [seen.connection for seen in http_server.seen] == [1, 1, 1]


def test_a_kept_connection_that_the_server_has_closed_is_not_reused(start_server):
    closed = threading.Event()

    def act(_seen):
        return lambda sock: (sock.sendall(answer(DONE)), hang_up(sock), closed.set())

    server, http_server = start_server(act)
    assert server.submit(make_call()).kind is OutcomeKind.DONE
    closed.wait(5)
    assert server.submit(make_call()).kind is OutcomeKind.DONE
    assert [seen.connection for seen in http_server.seen] == [1, 2]


def test_a_connection_is_not_reused_after_a_response_with_status_500(start_server):
    """uvicorn closes it a moment later without announcing it, when the next job would be sent."""
    server, http_server = start_server(lambda _seen: answer(DONE, 200 if len(http_server.seen) > 1 else 500))
    assert server.submit(make_call()).kind is OutcomeKind.RETRY
    assert [server.submit(make_call()).kind for _ in range(2)] == [OutcomeKind.DONE, OutcomeKind.DONE]
    assert [seen.connection for seen in http_server.seen] == [1, 2, 2]


def test_a_connection_that_was_idle_for_too_long_is_not_reused(start_server, monkeypatch):
    server, http_server = start_server(always(answer(DONE)))
    server.submit(make_call())
    monkeypatch.setattr(http_connection, "MAX_IDLE_S", 0.0)
    server.submit(make_call())
    assert [seen.connection for seen in http_server.seen] == [1, 2]


def test_a_kept_connection_that_closes_during_a_submit_leaves_the_outcome_unknown(start_server):
    server, http_server = start_server(lambda _seen: answer(DONE) if len(http_server.seen) == 1 else hang_up)
    assert server.submit(make_call()).kind is OutcomeKind.DONE
    assert server.submit(make_call()).kind is OutcomeKind.UNKNOWN
    assert len(http_server.seen) == 2


def test_a_connection_refused_after_an_exchange_is_unreachable(scripted, ours):
    assert ours(scripted(always(answer(DONE))).url).submit(make_call()).kind is OutcomeKind.DONE
    assert ours(refused_url()).submit(make_call()).kind is OutcomeKind.UNREACHABLE


def test_a_partly_read_response_does_not_affect_the_next_request(start_server):
    server, _ = start_server(lambda seen: answer(b"x" * 5000 if seen.json else DONE), max_response_bytes=1000)
    assert server.submit(make_call(payload=1)).code == "answer_too_large"
    assert server.submit(make_call(payload=0)).kind is OutcomeKind.DONE


def test_threads_share_a_server_adapter(start_server):
    server, _ = start_server(lambda seen: answer({"status": "done", "result": seen.json}))
    results: dict[int, object] = {}

    def submit_all(n: int) -> None:
        results[n] = [server.submit(make_call(payload=n * 100 + i)).result for i in range(20)]

    threads = [threading.Thread(target=submit_all, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [n * 100 + i for i in range(20)] for n in range(4)}


# -- status ----------------------------------------------------------------------------------------


def test_a_poll_contains_the_servers_id(start_server):
    server, http_server = start_server(always(answer({"status": "done", "result": 1})))
    assert server.status(make_call(), "a/b 1").result == 1
    (seen,) = http_server.seen
    assert (seen.method, seen.path, seen.body) == ("GET", "/status/a%2Fb%201", b"")
    assert seen.headers["x-source"] == "dispatcher" and "idempotency-key" not in seen.headers


def test_a_poll_whose_connection_is_refused_is_pending(ours):
    outcome = ours(refused_url() + "/generate").status(make_call(), "srv-1")
    assert (outcome.kind, outcome.code, outcome.remote_id) == (OutcomeKind.PENDING, "poll_failed", "srv-1")


@pytest.mark.parametrize("remote_id", ["..", "../health", "a\r\nb", ""])
def test_a_remote_id_that_would_change_the_path_is_not_requested(start_server, remote_id):
    server, http_server = start_server(always(answer(DONE)))
    assert server.status(make_call(), remote_id).kind is OutcomeKind.PENDING
    assert http_server.connections == 0


def test_status_steps_are_sent_in_order_until_one_gives_an_outcome(start_server):
    description = describe(status=[{"rules": [{"if": {"status": 404}, "then": "next"}]}, {"path": "/archive/{{id}}"}])
    server, http_server = start_server(
        lambda seen: answer({}, 404) if seen.path.startswith("/status") else answer(DONE), description
    )
    assert server.status(make_call(), "s1").kind is OutcomeKind.DONE
    assert [seen.path for seen in http_server.seen] == ["/status/s1", "/archive/s1"]


def test_all_status_steps_share_one_deadline(start_server):
    steps = [{"rules": [{"if": {"connection": "timeout"}, "then": "lost"}]}]
    server, http_server = start_server(lambda _seen: lambda _sock: http_server.stopped.wait(), describe(status=steps))
    assert server.status(make_call(deadline_s=0.1), "s1").kind is OutcomeKind.LOST


def test_the_result_step_is_sent_when_the_run_is_done(start_server):
    def act(seen):
        if seen.path == "/result/s1":
            return answer({"output": [1]})
        return answer({"status": "done" if len(http_server.seen) > 1 else "running"})

    server, http_server = start_server(act, describe(result={"result": "/output"}))
    assert server.status(make_call(), "s1").kind is OutcomeKind.PENDING
    assert server.status(make_call(), "s1") == Outcome(OutcomeKind.DONE, result=[1])
    assert [seen.path for seen in http_server.seen] == ["/status/s1", "/status/s1", "/result/s1"]


def test_a_run_whose_result_cannot_be_fetched_stays_pending(start_server):
    def act(seen):
        return answer({"status": "done"}) if "status" in seen.path else answer(b"", 500)

    server, _ = start_server(act, describe(result={}))
    assert server.status(make_call(), "s1").kind is OutcomeKind.PENDING


# -- push, cancel, ids -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"status":"done","result":1,"job_id":"srv-1"}', OutcomeKind.DONE),
        (b'{"status":"done","result":1,"job_id":"job-1"}', OutcomeKind.DONE),
        (b'{"status":"done","result":1,"job_id":"job-2"}', OutcomeKind.PENDING),
        (b'{"status":"failed"}', OutcomeKind.RETRY),
        (b'{"status":"failed","retryable":false}', OutcomeKind.FAILED),
        (b"NaN", OutcomeKind.PENDING),
    ],
)
def test_a_push_is_read_like_a_poll(start_server, body, kind):
    server, http_server = start_server(always(answer(DONE)))
    assert server.read_push(make_call(), "srv-1", Response(200, {}, body)).kind is kind
    assert http_server.connections == 0


@pytest.mark.parametrize(
    ("act", "is_accepted"),
    [
        (answer({"status": "canceled"}), True),
        (answer(b"", 204), True),
        (answer({"status": "success"}), True),
        (answer({"status": "completed"}), False),
        (answer({"status": "error"}), False),
        (answer({"detail": "unknown"}, 404), False),
        (answer(b"", 429), False),
        (hang_up, False),
    ],
)
def test_a_cancel_returns_whether_the_server_accepts_it(start_server, act, is_accepted):
    server, http_server = start_server(always(act))
    assert server.cancel(make_call(), "srv-1") is is_accepted
    assert (http_server.seen[0].method, http_server.seen[0].path) == ("POST", "/cancel/srv-1")


def test_a_cancel_without_the_servers_id_contains_the_jobs_id(start_server):
    server, http_server = start_server(always(answer({"status": "canceled", "job_id": "srv-9"})))
    assert server.cancel(make_call()) is True
    assert http_server.seen[0].path == "/cancel/job-1"


def test_without_a_cancel_step_no_cancel_is_sent(start_server):
    server, http_server = start_server(always(answer(b"")), describe(cancel=None))
    assert server.cancel(make_call(), "srv-1") is False and http_server.connections == 0


@pytest.mark.parametrize(("given", "known"), [(None, None), ("{{job/id}}", "job-1"), ("{{job/attempt_id}}", "job-1-2")])
def test_an_id_that_the_request_gives_is_known_before_the_response(given, known):
    assert ServerAdapter("http://h/x", Description(given_id=given)).given_id_of(make_call()) == known


# -- health ----------------------------------------------------------------------------------------


def test_health_contains_the_number_and_the_ids_of_active_jobs(start_server):
    server, http_server = start_server(always(answer({"active_jobs": 2, "job_ids": ["a", 7]})))
    health = server.health()
    assert (health.kind, health.active_jobs, health.job_ids) == (HealthKind.UP, 2, frozenset({"a", "7"}))
    assert health.running_count and http_server.seen[0].path == "/health"


def test_health_is_down_if_the_connection_is_refused(ours):
    assert ours(refused_url()).health().kind is HealthKind.DOWN


def test_health_is_busy_if_the_response_arrives_too_late(start_server):
    server, http_server = start_server(lambda _: lambda _: http_server.stopped.wait(), describe(health={"read_s": 0.1}))
    health = server.health()
    assert (health.kind, health.active_jobs, health.job_ids) == (HealthKind.BUSY, None, None)


def test_a_health_check_whose_connection_breaks_is_sent_once_more(start_server):
    server, http_server = start_server(
        lambda _seen: answer({"active_jobs": 0}) if len(http_server.seen) != 2 else hang_up
    )
    assert [server.health().kind for _ in range(2)] == [HealthKind.UP, HealthKind.UP]
    assert len(http_server.seen) == 3


def test_health_is_down_if_the_connection_breaks_twice(start_server):
    server, http_server = start_server(always(hang_up))
    assert server.health().kind is HealthKind.DOWN and len(http_server.seen) == 2


def test_health_is_garbage_if_the_response_is_too_large(start_server):
    server, _ = start_server(always(answer(b"[" + b" " * 1_100_000 + b"]")))
    assert server.health().kind is HealthKind.GARBAGE


def test_without_a_health_step_health_is_unknown(start_server):
    server, http_server = start_server(always(answer(b"")), describe(health=None))
    assert server.health().kind is HealthKind.UNKNOWN and http_server.connections == 0
