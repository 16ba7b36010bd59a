"""Streamed responses: events and pieces, results, and streams that break off or never end."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from routing.dispatch.outcome import OutcomeKind
from tasks.servers import Description, RunDetails, ServerAdapter, ServerSession
from tasks.servers.stream_reader import Piece
from tests.support.scripted import Act, answer, hang_up, reset

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
SSE, LINES, RAW = b"text/event-stream; charset=utf-8", b"application/x-ndjson", b"text/plain"
OPENAI: dict[str, Any] = {
    "piece": "/choices/0/delta/content",
    "rules": [{"if": {"text": r"^\[DONE\]$"}, "then": "end"}],
    "join": "text",
}
JOB = RunDetails("job-1", 1, {"prompt": "a cat"}, deadline_s=5.0)


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


END = chunk(b"")


def data(*events: bytes) -> bytes:
    return b"".join(b"data: %b\n\n" % event for event in events)


def delta(text: str) -> bytes:
    return b'{"choices":[{"delta":{"content":"%b"}}]}' % text.encode()


def chunks(*texts: bytes, kind: bytes = SSE, end: bytes = END) -> bytes:
    return HEAD % kind + b"".join(map(chunk, texts)) + end


def describe(stream: dict[str, Any], **submit: Any) -> Description:
    return Description.model_validate({"mode": "sync", "submit": {"stream": stream, **submit}})


@pytest.fixture
def outcome(scripted, ours):
    """Return a function that submits a job to a server with this response, and returns the outcome."""

    def submit_job(act: Act, stream: dict[str, Any], deadline_s: float = 5.0, **submit: Any) -> Any:
        http_server = scripted(lambda _seen: act)
        server = ours(http_server.url + "/generate", describe(stream, **submit), max_response_bytes=100_000)
        return server.submit(RunDetails("job-1", 1, {"prompt": "a cat"}, deadline_s=deadline_s))

    return submit_job


def kind_and_code(found: Any) -> tuple[OutcomeKind, str]:
    return found.kind, found.code


# -- events and results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_parsed_from_bytes_that_are_split_anywhere(line_end: bytes, size: int, outcome):
    text = b": a comment\nid: 7\n" + data(delta("Hel"), delta("lo ×"), b"[DONE]")
    text = text.replace(b"\n", line_end)
    found = outcome(chunks(*(text[n : n + size] for n in range(0, len(text), size))), OPENAI)
    assert (found.kind, found.result) == (OutcomeKind.DONE, "Hello ×")


def test_an_event_of_several_lines_is_one_piece(outcome):
    found = outcome(chunks(b'data: {"piece":\ndata: 1}\n\n' + data(b'{"status":"success","result":[1]}')), {})
    assert (found.kind, found.result) == (OutcomeKind.DONE, [1])


def test_the_last_event_is_read_like_a_response_that_is_not_streamed(outcome):
    last = b'{"status":"success","result":{"url":"x"}}'
    assert outcome(chunks(data(b'{"piece":"a"}', last)), {}).result == {"url": "x"}


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (b'{"status":"failed","error":"no","retryable":false}', (OutcomeKind.FAILED, "job_failed")),
        (b'{"status":"error","error":"out of memory"}', (OutcomeKind.RETRY, "job_failed")),
        (b'{"status":"canceled"}', (OutcomeKind.CANCELED, "canceled")),
        (b'{"error":"out of memory"}', (OutcomeKind.RETRY, "job_failed")),
    ],
)
def test_an_error_inside_a_200_is_an_error(last: bytes, expected: tuple[OutcomeKind, str], outcome):
    found = outcome(chunks(data(b'{"piece":"a"}', last)), {})
    assert kind_and_code(found) == expected
    assert b"out of memory" not in last or "out of memory" in found.message


def test_values_are_joined_to_a_list(outcome):
    found = outcome(chunks(b'{"n":1}\n{"n":[2]}\n\n{"n":"3"}', kind=LINES), LISTED)
    assert (found.kind, found.result) == (OutcomeKind.DONE, [1, [2], "3"])


LISTED: dict[str, Any] = {"frames": "lines", "piece": "/n", "join": "list", "ends_by": "length"}
RAW_TEXT: dict[str, Any] = {"frames": "raw", "join": "text", "ends_by": "length"}


def test_raw_text_is_complete_although_its_characters_are_split(outcome):
    text = "größer".encode()
    assert outcome(chunks(*(bytes([one]) for one in text), kind=RAW), RAW_TEXT).result == "größer"


def test_the_result_contains_the_text_and_the_kept_values(outcome):
    keep = {"usage": "/usage", "finish_reason": "/choices/0/finish_reason"}
    last = b'{"choices":[{"delta":{},"finish_reason":"stop"}],"usage":null}'
    usage = b'{"choices":[],"usage":{"total_tokens":3}}'
    found = outcome(chunks(data(delta("Hi"), last, usage, b"[DONE]")), {**OPENAI, "keep": keep})
    assert found.result == {"output": "Hi", "usage": {"total_tokens": 3}, "finish_reason": "stop"}


def test_a_null_counts_as_absent(outcome):
    stream = {"piece": "/token/text", "rules": [{"if": {"pointer": "/generated_text"}, "then": "end"}], "join": "text"}
    first, last = b'{"token":{"text":"a"},"generated_text":null}', b'{"token":{"text":"b"},"generated_text":"ab"}'
    assert outcome(chunks(data(first, last)), stream).result == "ab"


def test_an_event_is_known_by_its_name(outcome):
    stream = {
        "rules": [
            {"if": {"event": ["log", "ping"]}, "then": "skip"},
            {"if": {"event": "completed"}, "then": "end"},
        ]
    }
    text = b"event: log\ndata: no JSON\n\n" + b'event: completed\ndata: {"status":"success","result":7}\n\n'
    assert outcome(chunks(text), stream).result == 7


@pytest.mark.parametrize(("join", "result"), [("text", "ab"), ("list", ["a", "b"])])
def test_an_event_without_data_can_be_the_end_mark_and_is_skipped_otherwise(outcome, join, result):
    stream = {"piece": "", "join": join, "rules": [{"if": {"event": "end"}, "then": "end"}]}
    text = b'event: data\ndata: "a"\n\nevent: ping\n\nevent: data\ndata: "b"\n\nevent: end\n\n'
    assert outcome(chunks(text), stream).result == result
    assert outcome(chunks(text.replace(b"event: end\n\n", b"")), stream).code == "stream_unended"


WITH_LAST_PIECE: dict[str, Any] = {
    **OPENAI,
    "keep": {"finish_reason": "/choices/0/finish_reason", "usage": "/usage"},
    "rules": [*OPENAI["rules"], {"if": {"pointer": "/choices/0/finish_reason"}, "then": "last"}],
}
FINISH, USAGE = (
    b'{"choices":[{"delta":{"content":"lo"},"finish_reason":"stop"}]}',
    b'{"choices":[],"usage":{"total":2}}',
)


def test_a_stream_that_ends_properly_after_its_last_piece_is_complete(outcome):
    text = data(delta("Hel"), FINISH, USAGE)
    result = {"output": "Hello", "finish_reason": "stop", "usage": {"total": 2}}
    assert outcome(chunks(text), WITH_LAST_PIECE).result == result
    assert outcome(chunks(text + data(b"[DONE]")), WITH_LAST_PIECE).result == result
    without_length = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    assert outcome(closed(without_length + text), WITH_LAST_PIECE).result == result


def test_a_stream_that_ends_before_its_last_piece_is_cut(outcome):
    assert kind_and_code(outcome(chunks(data(delta("Hel"))), WITH_LAST_PIECE)) == CUT
    assert kind_and_code(outcome(broken_off(data(delta("Hel"), FINISH)), WITH_LAST_PIECE)) == LOST, (
        "the connection was reset"
    )


def test_the_message_of_an_unended_stream_names_the_rule_and_the_last_event(outcome):
    found = outcome(chunks(data(delta("Hel"), delta("lo"))), OPENAI)
    assert (found.code, found.message) == (
        "stream_unended",
        r"The server ended its stream; no event matched the rule for its end (text ^\[DONE\]$); "
        r'the last of 2 events was {"choices":[{"delta":{"content":"lo"}}]}',
    )


def test_if_the_end_mark_has_no_data_the_last_event_with_data_is_the_result(outcome):
    stream = {"rules": [{"if": {"event": "end"}, "then": "end"}, {"if": {"event": "message"}, "then": "piece"}]}
    text = b'data: {"status":"success","result":7}\n\nevent: end\n\n'
    assert outcome(chunks(text), stream).result == 7


def test_a_response_of_another_media_type_is_read_when_it_is_complete(outcome):
    assert outcome(answer({"status": "success", "result": 7}), {}).result == 7
    assert kind_and_code(outcome(answer({"status": "busy"}, 503, Content_Type="text/event-stream"), {})) == (
        OutcomeKind.BUSY,
        "busy",
    )


def test_the_fields_that_request_a_stream_do_not_replace_those_of_the_payload(scripted, ours):
    http_server = scripted(lambda _seen: answer({"status": "success"}))
    server = ours(http_server.url, describe({"ask": {"stream": True, "n": 1}}))
    server.submit(RunDetails("job-1", 1, {"n": 2}))
    assert http_server.seen[0].json == {"stream": True, "n": 2}


# -- pieces that are passed on ---------------------------------------------------------------------------------


def test_pieces_are_passed_on_while_the_run_continues(scripted, loop):
    """Each piece is received before the server sends the next one."""
    received: list[Piece] = []

    def act(sock: Any) -> None:
        sock.sendall(HEAD % SSE)
        for n, text in enumerate(["Hel", "lo"]):
            sock.sendall(chunk(data(delta(text))))
            _wait_until(lambda n=n: len(received) > n)
        sock.sendall(chunk(data(b"[DONE]")) + END)

    http_server = scripted(lambda _seen: act)
    session = ServerSession(ServerAdapter(http_server.url, describe(OPENAI)), loop.http, received.append)
    assert loop.wait_for(session.submit(JOB)).result == "Hello"
    assert [(piece.text, piece.offset) for piece in received] == [("Hel", 0), ("lo", 3)]


def test_progress_is_passed_on(scripted, loop):
    received: list[Piece] = []
    http_server = scripted(lambda _seen: chunks(data(b'{"progress":0.5}', b'{"status":"success","result":1}')))
    session = ServerSession(ServerAdapter(http_server.url, describe({})), loop.http, received.append)
    assert loop.wait_for(session.submit(JOB)).result == 1
    assert [piece.progress for piece in received] == [0.5]


def test_the_progress_in_a_poll_is_passed_on(scripted, loop):
    received: list[Piece] = []
    http_server = scripted(lambda _seen: answer({"status": "processing", "job_id": "r1", "progress": {"percent": 40}}))
    session = ServerSession(ServerAdapter(http_server.url), loop.http, received.append)
    assert loop.wait_for(session.status(JOB, "r1")).kind is OutcomeKind.PENDING
    assert [piece.progress for piece in received] == [{"percent": 40}]


def test_the_connection_of_a_stream_that_ended_properly_is_reused(scripted, loop):
    http_server = scripted(lambda _seen: chunks(data(b"[DONE]")))
    server = ServerAdapter(http_server.url, describe(OPENAI))
    for _ in range(3):
        assert loop.wait_for(ServerSession(server, loop.http).submit(JOB)).kind is OutcomeKind.DONE
    assert http_server.connections == 1


# -- faulty streams --------------------------------------------------------------------------------------------


def _wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    assert condition()


def drip(piece: bytes, before: bytes = b"") -> Act:
    """Return a response that repeats this piece every 10 ms, without end."""

    def send(sock: Any) -> None:
        sock.sendall(HEAD % SSE + (chunk(before) if before else b""))
        while True:
            sock.sendall(chunk(piece))
            time.sleep(0.01)

    return send


def closed(text: bytes) -> Act:
    def send(sock: Any) -> None:
        sock.sendall(text)
        hang_up(sock)

    return send


def broken_off(*texts: bytes) -> Act:
    def send(sock: Any) -> None:
        sock.sendall(chunks(*texts, end=b""))
        time.sleep(0.05)  # Without this pause, the reset would overtake the data.
        reset(sock)

    return send


TIMED_OUT, LOST = (OutcomeKind.UNKNOWN, "no_answer"), (OutcomeKind.UNKNOWN, "connection_lost")
GARBAGE, TOO_LARGE = (OutcomeKind.RETRY, "bad_answer"), (OutcomeKind.FAILED, "answer_too_large")
UNENDED, ERROR = (OutcomeKind.RETRY, "stream_unended"), (OutcomeKind.RETRY, "job_failed")
CUT = (OutcomeKind.RETRY, "stream_cut")
BEGUN = data(delta("Hel"))


@pytest.mark.parametrize(
    ("response", "stream", "expected"),
    [
        pytest.param(drip(BEGUN), {}, TIMED_OUT, id="a stream without an end"),
        pytest.param(drip(b": still here\n\n", BEGUN), {"silent_s": 0.2}, TIMED_OUT, id="heartbeats for ever"),
        pytest.param(drip(b": still here\n\n", BEGUN), {}, TIMED_OUT, id="heartbeats until the deadline"),
        pytest.param(drip(b"x", BEGUN), {}, TIMED_OUT, id="bytes without an event"),
        pytest.param(chunks(BEGUN, data(b'{"error":{"message":"no memory"}}')), {}, ERROR, id="an error inside"),
        pytest.param(
            chunks(BEGUN, data(b'{"error":{"message":"no memory"}}', b"[DONE]")),
            {},
            ERROR,
            id="an error and an end mark",
        ),
        pytest.param(broken_off(BEGUN), {}, LOST, id="a broken connection"),
        pytest.param(chunks(BEGUN), {}, UNENDED, id="no end mark"),
        pytest.param(chunks(), {}, CUT, id="an empty stream"),
        pytest.param(broken_off(BEGUN, b"data: [DONE]\n"), {}, LOST, id="an end mark that is cut"),
        pytest.param(chunks(BEGUN, b"data: [DON"), {}, GARBAGE, id="half an end mark"),
        pytest.param(chunks(BEGUN, b'data: {"error":"no memory"}'), {}, ERROR, id="an error without a line end"),
        pytest.param(chunks(BEGUN, data(b"<html>502</html>")), {}, GARBAGE, id="an HTML page in an event"),
        pytest.param(chunks(BEGUN, b"<html>502</html>\n\n"), {}, UNENDED, id="an HTML page between events"),
        pytest.param(chunks(delta("Hel") + b"\n", kind=SSE), {}, UNENDED, id="lines instead of events"),
        pytest.param(chunks(b"<html>", kind=b"text/html"), {}, GARBAGE, id="an HTML page instead of a stream"),
        pytest.param(
            chunks(data(b'{"choices":[{"delta":{"content":7}}]}')), {}, GARBAGE, id="a piece that is not text"
        ),
        pytest.param(chunks(*[b"data: " + b"x" * 60_000] * 2), {}, TOO_LARGE, id="a huge piece"),
        pytest.param(chunks(*[BEGUN * 1000] * 3), {}, TOO_LARGE, id="a text that is too long"),
        pytest.param(chunks(BEGUN), {"ends_by": "mark", "join": "last", "rules": []}, UNENDED, id="no last event"),
        pytest.param(
            closed(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\nHel"),
            RAW_TEXT,
            CUT,
            id="no length",
        ),
    ],
)
def test_each_faulty_stream_gives_the_outcome_of_its_fault(
    response: Act, stream: dict[str, Any], expected: tuple[OutcomeKind, str], outcome
):
    # Short only if nothing else ends the stream: a busy machine may take longer to connect.
    deadline_s = 2.0 if expected == TIMED_OUT else 30.0
    found = outcome(response, {**OPENAI, **stream} if "frames" not in stream else stream, deadline_s=deadline_s)
    assert kind_and_code(found) == expected


def test_a_stream_of_heartbeats_alone_times_out_after_the_longest_silence(scripted, loop):
    http_server = scripted(lambda _seen: drip(b": still here\n\n", BEGUN))
    session = ServerSession(ServerAdapter(http_server.url, describe({**OPENAI, "silent_s": 0.2})), loop.http)
    began = time.monotonic()
    assert kind_and_code(loop.wait_for(session.submit(RunDetails("job-1", 1, {}, deadline_s=40.0)))) == TIMED_OUT
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("more", [data(delta("and more")), b": still here\n\n"])
def test_data_after_the_end_mark_do_not_change_the_outcome(more: bytes, outcome):
    began = time.monotonic()
    found = outcome(drip(more, BEGUN + data(b"[DONE]")), OPENAI, deadline_s=30.0)
    assert (found.kind, found.result) == (OutcomeKind.DONE, "Hel")
    assert time.monotonic() - began < 15


def test_a_connection_that_breaks_after_the_end_mark_does_not_change_the_outcome(outcome):
    assert outcome(broken_off(BEGUN, data(b"[DONE]")), OPENAI).result == "Hel"


def test_a_server_whose_stream_is_not_read_to_the_end_may_still_run_the_job(outcome):
    found = outcome(drip(data(b"<html>")), OPENAI, deadline_s=30.0)
    assert kind_and_code(found) == GARBAGE and found.server_still_running


def test_a_stream_of_too_many_values_fails(outcome, monkeypatch):
    monkeypatch.setattr("tasks.servers.stream_reader.MAX_PIECES", 3)
    assert kind_and_code(outcome(chunks(b'{"n":1}\n' * 4, kind=LINES), LISTED)) == TOO_LARGE


def test_a_value_that_is_nested_too_deep_fails(outcome):
    deep = b'{"n":' + b"[" * 210 + b"]" * 210 + b"}\n"
    assert kind_and_code(outcome(chunks(deep, kind=LINES), LISTED)) == (OutcomeKind.FAILED, "answer_too_deep")


def test_a_run_can_continue_after_its_stream_only_if_it_is_polled(scripted, ours):
    stream = {"rules": [{"if": {"pointer": "/status", "value": "processing"}, "then": "end"}]}
    answered = chunks(data(b'{"status":"processing","job_id":"r1"}'))
    http_server = scripted(lambda _seen: answered)

    def submit_in(mode: str) -> Any:
        description = Description.model_validate({"mode": mode, "submit": {"stream": stream}})
        return ours(http_server.url + "/generate", description).submit(JOB)

    assert (submit_in("async").kind, submit_in("async").remote_id) == (OutcomeKind.PENDING, "r1")
    assert kind_and_code(submit_in("sync")) == (OutcomeKind.RETRY, "bad_answer")
