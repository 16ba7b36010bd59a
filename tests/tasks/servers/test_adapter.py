import gzip
import json
import socket
import threading
import time
from typing import Any

import pytest

from routing.dispatch.outcome import Outcome, OutcomeKind
from slotkeeper import json_text, large_json
from tasks.servers import Call, Description, HealthKind, ServerAdapter, ServerSession, http_connection
from tests.support.scripted import Scripted, always, answer, hang_up, refused_url, reset

DONE = {"status": "success", "result": {"image": "x"}}
_CUT_WITHIN_S = 15  # a deadline of a third of a second, on a machine that has much else to do; else nothing is cut
TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def a_call(**more) -> Call:
    return Call(**{"job_id": "job-1", "attempt": 2, "payload": {"prompt": "cat"}, "deadline_s": 5.0, **more})


@pytest.fixture
def serving(scripted, ours):
    """A server that acts so, and our side of it."""

    def start(act, description=None, **more) -> tuple[Any, Scripted]:
        server = scripted(act)
        return ours(server.url + "/generate", description or Description(), **more), server

    return start


def described(**parts) -> Description:
    return Description.model_validate(parts)


# -- what is sent ----------------------------------------------------------------------------------


def test_a_submit_sends_the_payload_with_our_headers(serving):
    server, there = serving(always(answer(DONE)))
    call = a_call(callback_url="http://me/cb", callback_token="tok", traceparent=TRACE)
    assert server.submit(call) == Outcome(OutcomeKind.DONE, result={"image": "x"})
    (seen,) = there.seen
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


def test_what_there_is_none_of_is_not_sent(serving):
    server, there = serving(always(answer(DONE)))
    server.submit(a_call(traceparent="bad\r\nX-Evil: 1"))
    assert not {"x-callback-url", "x-callback-token", "traceparent", "x-evil"} & there.seen[0].headers.keys()


@pytest.mark.parametrize("payload", [None, [], "text", 0, {"seed": 2**70}])
def test_any_json_value_is_a_payload(serving, payload):
    server, there = serving(always(answer(DONE)))
    server.submit(a_call(payload=payload))
    assert json.loads(there.seen[0].body) == payload


def test_a_payload_that_is_no_json_is_final_and_nothing_is_sent(serving):
    server, there = serving(always(answer(DONE)))
    outcome = server.submit(a_call(payload={"x": object()}))
    assert (outcome.kind, outcome.code, there.connections) == (OutcomeKind.FAILED, "bad_payload", 0)


def test_a_described_request_is_filled_in(serving):
    submit = {
        "path": "/v1/{{raw:payload/model}}/predict",
        "method": "PUT",
        "headers": {"Authorization": "Bearer {{secret/KEY}}"},
        "body": {"id": "{{job/attempt_id}}", "input": "{{payload/input}}", "webhook": "{{callback_url}}"},
    }
    server, there = serving(always(answer(DONE)), described(submit=submit), secret={"KEY": "s3cret"}.get)
    server.submit(a_call(payload={"model": "org/m", "input": {"n": 1}}, callback_url="http://me/cb"))
    (seen,) = there.seen
    assert (seen.method, seen.path) == ("PUT", "/v1/org/m/predict")
    assert seen.headers["authorization"] == "Bearer s3cret"
    assert seen.json == {"id": "job-1-2", "input": {"n": 1}, "webhook": "http://me/cb"}


def test_a_secret_echoed_by_the_server_is_not_repeated(serving):
    submit = {"headers": {"Authorization": "Bearer {{secret/KEY}}"}}
    refusal = answer({"error": "s3cret is not valid, nor is tok-9"}, 401)
    server, _ = serving(always(refusal), described(submit=submit), secret={"KEY": "s3cret"}.get)
    outcome = server.submit(a_call(callback_token="tok-9"))
    assert outcome.message == "the server answered 401: *** is not valid, nor is ***"


def test_a_missing_secret_sends_nothing(serving):
    server, there = serving(always(answer(DONE)), described(submit={"headers": {"A": "{{secret/KEY}}"}}))
    outcome = server.submit(a_call())
    assert (outcome.kind, outcome.code, there.connections) == (OutcomeKind.RETRY, "misconfigured", 0)


def test_nothing_is_taken_from_the_environment(serving, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", refused_url())
    monkeypatch.setenv("http_proxy", refused_url())
    server, _ = serving(always(answer(DONE)))
    assert server.submit(a_call()).kind is OutcomeKind.DONE


def test_cookies_are_not_kept(serving):
    server, there = serving(always(answer(DONE, 200, Set_Cookie="a=b")))
    server.submit(a_call())
    server.submit(a_call())
    assert "cookie" not in there.seen[1].headers


@pytest.mark.parametrize("endpoint", ["", "gpu1:9001/x", "ftp://h/x", "http:///x", "http://h:99999/x", "http://h/\n"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint):
    with pytest.raises(ValueError):
        ServerAdapter(endpoint)


# -- whether it was sent ---------------------------------------------------------------------------


def test_a_refused_connection_is_unreachable(ours):
    outcome = ours(refused_url() + "/generate").submit(a_call())
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNREACHABLE, "connect_failed")


def test_a_host_without_an_address_is_unreachable(ours):
    assert ours("http://nowhere.invalid:1/x").submit(a_call()).kind is OutcomeKind.UNREACHABLE


def test_a_connection_that_takes_too_long_is_unreachable(ours, silent_address):
    description = described(submit={"connect_s": 0.1})
    assert ours(f"http://127.0.0.2:{silent_address}/x", description).submit(a_call()).kind is OutcomeKind.UNREACHABLE


def test_a_tls_handshake_that_fails_is_unreachable(scripted, ours):
    plain = scripted(always(hang_up))
    url = plain.url.replace("http://", "https://")
    assert ours(url + "/x").submit(a_call()).kind is OutcomeKind.UNREACHABLE
    assert plain.seen == []


def test_a_tls_handshake_that_hangs_is_unreachable(ours):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}/x"
        outcome = ours(url).submit(a_call(deadline_s=0.2))
    assert outcome.kind is OutcomeKind.UNREACHABLE


def test_no_time_left_sends_nothing(serving):
    server, there = serving(always(answer(DONE)))
    assert server.submit(a_call(deadline_s=0.0)).kind is OutcomeKind.UNREACHABLE
    assert there.connections == 0


def test_a_silent_server_leaves_the_outcome_unknown(serving):
    server, there = serving(lambda _seen: lambda _sock: there.stopped.wait())
    outcome = server.submit(a_call(deadline_s=0.2))
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNKNOWN, "no_answer")


def test_a_steps_own_read_timeout_counts_before_the_deadline(serving):
    server, there = serving(lambda _seen: lambda _sock: there.stopped.wait(), described(submit={"read_s": 0.1}))
    started = time.monotonic()
    assert server.submit(a_call(deadline_s=60.0)).code == "no_answer"
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("act", [reset, hang_up], ids=["reset", "closed"])
def test_a_connection_lost_after_sending_leaves_the_outcome_unknown(serving, act):
    server, there = serving(always(act))
    outcome = server.submit(a_call())
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNKNOWN, "connection_lost")
    assert len(there.seen) == 1  # and is not repeated


@pytest.mark.parametrize(
    "cut",
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
def test_half_an_answer_leaves_the_outcome_unknown(serving, cut, end):
    def act(_seen):
        return lambda sock: (sock.sendall(cut), end(sock))

    server, _ = serving(act)
    assert server.submit(a_call()).kind is OutcomeKind.UNKNOWN


def trickle(there_of, beginning: bytes, piece: bytes):
    def act(_seen):
        def send(sock):
            sock.sendall(beginning)
            while not there_of().stopped.wait(0.01):
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
def test_a_trickle_is_cut_at_the_deadline(serving, beginning, piece):
    server, there = serving(trickle(lambda: there, beginning, piece))
    started = time.monotonic()
    outcome = server.submit(a_call(deadline_s=0.2))
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNKNOWN, "no_answer")
    assert time.monotonic() - started < _CUT_WITHIN_S


def test_a_server_that_does_not_read_is_cut_at_the_deadline(scripted, ours):
    with socket.create_server(("127.0.0.1", 0), backlog=1) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/x"
        started = time.monotonic()
        outcome = ours(url).submit(a_call(payload="x" * 30_000_000, deadline_s=0.3))
    assert outcome.kind is OutcomeKind.UNKNOWN and time.monotonic() - started < _CUT_WITHIN_S


def test_a_kept_connection_to_a_server_that_stopped_reading_is_cut_at_the_deadline(serving):
    server, there = serving(lambda _seen: lambda sock: (sock.sendall(answer(DONE)), there.stopped.wait()))
    assert server.submit(a_call(deadline_s=60)).kind is OutcomeKind.DONE
    started = time.monotonic()
    outcome = server.submit(a_call(payload="x" * 30_000_000, deadline_s=0.3))
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNKNOWN, "no_answer")
    assert time.monotonic() - started < _CUT_WITHIN_S


def test_a_large_payload_may_take_longer_than_connecting(serving):
    server, _ = serving(always(answer(DONE)), described(submit={"connect_s": 0.05}))
    assert server.submit(a_call(payload="x" * 60_000_000, deadline_s=20)).kind is OutcomeKind.DONE


def test_what_cannot_be_written_as_a_request_costs_a_retry_and_is_not_sent(serving):
    server, there = serving(always(answer(DONE)))
    outcome = server.submit(a_call(callback_url="http://me/\u4e2d"))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "misconfigured")
    assert there.seen == []


def test_an_endless_deadline_is_a_long_one(serving):
    server, _ = serving(always(answer(DONE)))
    assert server.submit(a_call(deadline_s=float("inf"))).kind is OutcomeKind.DONE


# -- what comes back -------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"status":"success","result":NaN}'], ids=["empty", "html", "nan"])
def test_garbage_costs_a_retry(serving, body):
    server, _ = serving(always(answer(body, 200, Content_Type="application/json")))
    outcome = server.submit(a_call())
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "bad_answer")


def test_a_redirect_is_not_followed(serving, scripted):
    elsewhere = scripted(always(answer(DONE)))
    server, _ = serving(always(answer(b"", 307, Location=elsewhere.url + "/x")))
    outcome = server.submit(a_call(deadline_s=5))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "bad_answer")
    assert elsewhere.connections == 0


def test_an_error_that_repeats_the_endpoint_does_not_tell_its_keys(scripted, ours):
    there = scripted(lambda seen: answer({"error": f"no route for {seen.path} (token abc/def-1 is unknown)"}, 400))
    server = ours(there.url + "/generate?v=2&token=abc%2Fdef-1", Description())
    message = server.submit(a_call()).message
    assert "abc" not in message
    assert "v=2&token=***" in message


def test_the_body_of_a_redirect_is_bounded_too(serving):
    server, _ = serving(always(answer(b"x" * 5000, 302, Location="/x")), max_response_bytes=1000)
    assert server.submit(a_call()).code == "answer_too_large"


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
    ids=["length", "chunks", "until closed", "packed"],
)
def test_an_answer_beyond_the_bound_is_given_up(serving, act):
    server, _ = serving(always(act), max_response_bytes=1000)
    outcome = server.submit(a_call(deadline_s=2))
    assert (outcome.kind, outcome.code) == (OutcomeKind.FAILED, "answer_too_large")


def test_an_announced_giant_is_not_read_at_all(serving):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"
    server, there = serving(lambda _seen: lambda sock: (sock.sendall(head), there.stopped.wait()))
    assert server.submit(a_call(deadline_s=30)).code == "answer_too_large"


@pytest.mark.parametrize(
    "act", [chunked(b'{"status":', b'"done","result":1}'), gzipped(b'{"status":"done","result":1}')]
)
def test_chunks_and_packed_answers_are_read(serving, act):
    server, _ = serving(always(act))
    assert server.submit(a_call()).result == 1


def test_a_large_result_within_the_bound_is_read(serving):
    server, _ = serving(always(answer({"status": "done", "result": "x" * 3_000_000})))
    assert json_text.dumps(server.submit(a_call()).result) == b'"' + b"x" * 3_000_000 + b'"'


def test_a_worker_reads_an_answer_above_4_mib_in_a_process_of_its_own(serving, monkeypatch):
    server, _ = serving(always(answer({"status": "done", "result": ["x" * 5_000_000]})))
    monkeypatch.setattr(large_json, "parse", lambda _: pytest.fail("read in this process"))
    result = server.submit(a_call()).result
    assert isinstance(result, json_text.RawJson) and result.size == len(result.text) == 5_000_004


def test_an_answer_above_4_mib_that_is_no_json_is_nonsense(serving):
    server, _ = serving(always(answer(b'{"status":"done","result":[' + b"[]," * 2_000_000)))
    assert server.submit(a_call()).code == "bad_answer"


def test_busy_comes_with_the_servers_wish(serving):
    server, _ = serving(always(answer({"error": "full"}, 503, Retry_After="7")))
    outcome = server.submit(a_call())
    assert (outcome.kind, outcome.retry_after_s) == (OutcomeKind.BUSY, 7.0)


# -- connections -----------------------------------------------------------------------------------


def test_connections_are_kept(serving):
    server, there = serving(always(answer(DONE)))
    for _ in range(3):
        server.submit(a_call())
    assert [seen.connection for seen in there.seen] == [1, 1, 1]


def test_a_connection_that_the_server_has_closed_meanwhile_is_not_reused(serving):
    closed = threading.Event()

    def act(_seen):
        return lambda sock: (sock.sendall(answer(DONE)), hang_up(sock), closed.set())

    server, there = serving(act)
    assert server.submit(a_call()).kind is OutcomeKind.DONE
    closed.wait(5)
    assert server.submit(a_call()).kind is OutcomeKind.DONE
    assert [seen.connection for seen in there.seen] == [1, 2]


def test_a_connection_on_which_the_server_has_failed_is_not_reused(serving):
    """Servers close it a moment later, without having announced it: in which the next job would be sent."""
    server, there = serving(lambda _seen: answer(DONE, 200 if len(there.seen) > 1 else 500))
    assert server.submit(a_call()).kind is OutcomeKind.RETRY
    assert [server.submit(a_call()).kind for _ in range(2)] == [OutcomeKind.DONE, OutcomeKind.DONE]
    assert [seen.connection for seen in there.seen] == [1, 2, 2]


def test_a_connection_idle_for_long_is_not_reused(serving, monkeypatch):
    server, there = serving(always(answer(DONE)))
    server.submit(a_call())
    monkeypatch.setattr(http_connection, "MAX_IDLE_S", 0.0)
    server.submit(a_call())
    assert [seen.connection for seen in there.seen] == [1, 2]


def test_a_kept_connection_that_dies_under_a_submit_leaves_the_outcome_unknown(serving):
    server, there = serving(lambda _seen: answer(DONE) if len(there.seen) == 1 else hang_up)
    assert server.submit(a_call()).kind is OutcomeKind.DONE
    assert server.submit(a_call()).kind is OutcomeKind.UNKNOWN
    assert len(there.seen) == 2


def test_a_refusal_after_an_exchange_is_still_unreachable(scripted, ours):
    assert ours(scripted(always(answer(DONE))).url).submit(a_call()).kind is OutcomeKind.DONE
    assert ours(refused_url()).submit(a_call()).kind is OutcomeKind.UNREACHABLE


def test_half_read_answers_do_not_spoil_the_next_one(serving):
    server, _ = serving(lambda seen: answer(b"x" * 5000 if seen.json else DONE), max_response_bytes=1000)
    assert server.submit(a_call(payload=1)).code == "answer_too_large"
    assert server.submit(a_call(payload=0)).kind is OutcomeKind.DONE


def test_a_server_is_shared(serving):
    server, _ = serving(lambda seen: answer({"status": "done", "result": seen.json}))
    results: dict[int, object] = {}

    def work(n: int) -> None:
        results[n] = [server.submit(a_call(payload=n * 100 + i)).result for i in range(20)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [n * 100 + i for i in range(20)] for n in range(4)}


# -- status ----------------------------------------------------------------------------------------


def test_a_poll_asks_by_the_servers_id(serving):
    server, there = serving(always(answer({"status": "done", "result": 1})))
    assert server.status(a_call(), "a/b 1").result == 1
    (seen,) = there.seen
    assert (seen.method, seen.path, seen.body) == ("GET", "/status/a%2Fb%201", b"")
    assert seen.headers["x-source"] == "dispatcher" and "idempotency-key" not in seen.headers


def test_a_poll_that_finds_nobody_is_still_pending(ours):
    outcome = ours(refused_url() + "/generate").status(a_call(), "srv-1")
    assert (outcome.kind, outcome.code, outcome.remote_id) == (OutcomeKind.PENDING, "poll_failed", "srv-1")


@pytest.mark.parametrize("remote_id", ["..", "../health", "a\r\nb", ""])
def test_an_id_that_leads_elsewhere_is_not_asked_for(serving, remote_id):
    server, there = serving(always(answer(DONE)))
    assert server.status(a_call(), remote_id).kind is OutcomeKind.PENDING
    assert there.connections == 0


def test_status_steps_are_asked_in_order_until_one_knows(serving):
    description = described(status=[{"rules": [{"if": {"status": 404}, "then": "next"}]}, {"path": "/archive/{{id}}"}])
    server, there = serving(
        lambda seen: answer({}, 404) if seen.path.startswith("/status") else answer(DONE), description
    )
    assert server.status(a_call(), "s1").kind is OutcomeKind.DONE
    assert [seen.path for seen in there.seen] == ["/status/s1", "/archive/s1"]


def test_all_status_steps_share_one_deadline(serving):
    steps = [{"rules": [{"if": {"connection": "timeout"}, "then": "lost"}]}]
    server, there = serving(lambda _seen: lambda _sock: there.stopped.wait(), described(status=steps))
    assert server.status(a_call(deadline_s=0.1), "s1").kind is OutcomeKind.LOST


def test_a_result_that_stands_elsewhere_is_fetched_once_the_job_is_done(serving):
    def act(seen):
        if seen.path == "/result/s1":
            return answer({"output": [1]})
        return answer({"status": "done" if len(there.seen) > 1 else "running"})

    server, there = serving(act, described(result={"result": "/output"}))
    assert server.status(a_call(), "s1").kind is OutcomeKind.PENDING
    assert server.status(a_call(), "s1") == Outcome(OutcomeKind.DONE, result=[1])
    assert [seen.path for seen in there.seen] == ["/status/s1", "/status/s1", "/result/s1"]


def test_a_result_that_cannot_be_fetched_now_is_asked_for_again(serving):
    server, _ = serving(
        lambda seen: answer({"status": "done"}) if "status" in seen.path else answer(b"", 500), described(result={})
    )
    assert server.status(a_call(), "s1").kind is OutcomeKind.PENDING


# -- push, cancel, ids ------------------------------------------------------------------------------


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
def test_a_push_is_read_like_a_poll(serving, body, kind):
    server, there = serving(always(answer(DONE)))
    assert server.read_push(a_call(), "srv-1", body).kind is kind
    assert there.connections == 0


@pytest.mark.parametrize(
    ("act", "said_yes"),
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
def test_a_cancel_tells_whether_the_server_said_yes(serving, act, said_yes):
    server, there = serving(always(act))
    assert server.cancel(a_call(), "srv-1") is said_yes
    assert (there.seen[0].method, there.seen[0].path) == ("POST", "/cancel/srv-1")


def test_a_cancel_without_the_servers_id_uses_ours(serving):
    server, there = serving(always(answer({"status": "canceled", "job_id": "srv-9"})))
    assert server.cancel(a_call()) is True
    assert there.seen[0].path == "/cancel/job-1"


def test_a_server_that_cannot_cancel_is_not_asked(serving):
    server, there = serving(always(answer(b"")), described(cancel=None))
    assert server.cancel(a_call(), "srv-1") is False and there.connections == 0


@pytest.mark.parametrize(("given", "known"), [(None, None), ("{{job/id}}", "job-1"), ("{{job/attempt_id}}", "job-1-2")])
def test_an_id_that_we_give_is_known_without_an_answer(given, known):
    assert ServerAdapter("http://h/x", Description(given_id=given)).given_id_of(a_call()) == known


# -- health ----------------------------------------------------------------------------------------


def test_health_tells_how_many_and_which_jobs_run(serving):
    server, there = serving(always(answer({"active_jobs": 2, "job_ids": ["a", 7]})))
    health = server.health()
    assert (health.kind, health.active_jobs, health.job_ids) == (HealthKind.UP, 2, frozenset({"a", "7"}))
    assert health.running_count and there.seen[0].path == "/health"


def test_a_health_without_a_server_is_down(ours):
    assert ours(refused_url()).health().kind is HealthKind.DOWN


def test_a_slow_health_is_busy_and_not_dead(serving):
    server, there = serving(lambda _seen: lambda _sock: there.stopped.wait(), described(health={"read_s": 0.1}))
    health = server.health()
    assert (health.kind, health.active_jobs, health.job_ids) == (HealthKind.BUSY, None, None)


def test_a_health_asked_on_a_dying_connection_is_asked_once_more(serving):
    server, there = serving(lambda _seen: answer({"active_jobs": 0}) if len(there.seen) != 2 else hang_up)
    assert [server.health().kind for _ in range(2)] == [HealthKind.UP, HealthKind.UP]
    assert len(there.seen) == 3


def test_a_health_that_always_breaks_is_down(serving):
    server, there = serving(always(hang_up))
    assert server.health().kind is HealthKind.DOWN and len(there.seen) == 2


def test_an_endless_health_is_garbage(serving):
    server, _ = serving(always(answer(b"[" + b" " * 1_100_000 + b"]")))
    assert server.health().kind is HealthKind.GARBAGE


def test_a_server_without_a_health_check_is_unknown(serving):
    server, there = serving(always(answer(b"")), described(health=None))
    assert server.health().kind is HealthKind.UNKNOWN and there.connections == 0


# -- cut short -------------------------------------------------------------------------------------


def test_a_call_that_is_cut_ends_at_once_and_leaves_the_outcome_unknown(scripted, loop):
    seen = threading.Event()

    def act(_seen):
        seen.set()
        return lambda _sock: there.stopped.wait()

    there = scripted(act)
    resets_are_retried = described(submit={"rules": [{"if": {"connection": "reset"}, "then": "retry"}]})
    live = ServerSession(ServerAdapter(there.url + "/generate", resets_are_retried), loop.http)
    cutter = threading.Thread(target=lambda: (seen.wait(10), loop.soon(live.cut_off)))
    cutter.start()
    outcome = loop.wait_for(live.submit(a_call(deadline_s=60.0)))
    cutter.join()
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNKNOWN, "cut_short"), "whatever a reset would mean otherwise"


def test_a_call_that_is_cut_before_it_began_sends_nothing(scripted, loop):
    there = scripted(always(answer(DONE)))
    live = ServerSession(ServerAdapter(there.url + "/generate"), loop.http)
    live.cut_off()
    assert loop.wait_for(live.submit(a_call())).kind is OutcomeKind.UNKNOWN
    assert there.seen == []


def test_a_cut_after_the_answer_does_not_touch_the_connection(scripted, loop):
    there = scripted(always(answer(DONE)))
    server = ServerAdapter(there.url + "/generate")
    live = ServerSession(server, loop.http)
    assert loop.wait_for(live.submit(a_call())).kind is OutcomeKind.DONE
    live.cut_off()
    assert loop.wait_for(ServerSession(server, loop.http).submit(a_call())).kind is OutcomeKind.DONE
    assert there.connections == 1


def test_to_cut_a_call_does_not_cut_questions_about_it(scripted, loop):
    there = scripted(always(answer({"status": "completed", "result": 1})))
    live = ServerSession(ServerAdapter(there.url + "/generate"), loop.http)
    live.cut_off()
    assert loop.wait_for(live.status(a_call(), "r-1")).kind is OutcomeKind.DONE
