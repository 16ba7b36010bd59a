"""Streamed answers: how they are taken apart and put together, and those that lie."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from routing.dispatch.outcome import OutcomeKind
from tasks.servers import Call, Description, ServerAdapter, ServerSession
from tasks.servers.stream_reader import Piece
from tests.support.scripted import Act, answer, hang_up, reset

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
SSE, LINES, RAW = b"text/event-stream; charset=utf-8", b"application/x-ndjson", b"text/plain"
OPENAI: dict[str, Any] = {
    "piece": "/choices/0/delta/content",
    "rules": [{"if": {"text": r"^\[DONE\]$"}, "then": "end"}],
    "join": "text",
}
JOB = Call("job-1", 1, {"prompt": "a cat"}, deadline_s=5.0)


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


END = chunk(b"")


def data(*events: bytes) -> bytes:
    return b"".join(b"data: %b\n\n" % event for event in events)


def delta(text: str) -> bytes:
    return b'{"choices":[{"delta":{"content":"%b"}}]}' % text.encode()


def chunks(*texts: bytes, kind: bytes = SSE, end: bytes = END) -> bytes:
    return HEAD % kind + b"".join(map(chunk, texts)) + end


def described(stream: dict[str, Any], **submit: Any) -> Description:
    return Description.model_validate({"mode": "sync", "submit": {"stream": stream, **submit}})


@pytest.fixture
def outcome(scripted, ours):
    """What comes of a job whose server answers so."""

    def make(act: Act, stream: dict[str, Any], deadline_s: float = 5.0, **submit: Any) -> Any:
        there = scripted(lambda _seen: act)
        server = ours(there.url + "/generate", described(stream, **submit), max_response_bytes=100_000)
        return server.submit(Call("job-1", 1, {"prompt": "a cat"}, deadline_s=deadline_s))

    return make


def told(found: Any) -> tuple[OutcomeKind, str]:
    return found.kind, found.code


# -- taken apart and put together ------------------------------------------------------------------------------


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_found_wherever_the_bytes_are_cut(line_end: bytes, size: int, outcome):
    text = b": a comment\nid: 7\n" + data(delta("Hel"), delta("lo ×"), b"[DONE]")
    text = text.replace(b"\n", line_end)
    found = outcome(chunks(*(text[n : n + size] for n in range(0, len(text), size))), OPENAI)
    assert (found.kind, found.result) == (OutcomeKind.DONE, "Hello ×")


def test_an_event_of_several_lines_is_one_piece(outcome):
    found = outcome(chunks(b'data: {"piece":\ndata: 1}\n\n' + data(b'{"status":"success","result":[1]}')), {})
    assert (found.kind, found.result) == (OutcomeKind.DONE, [1])


def test_the_last_event_is_read_as_an_answer_that_does_not_stream(outcome):
    last = b'{"status":"success","result":{"url":"x"}}'
    assert outcome(chunks(data(b'{"piece":"a"}', last)), {}).result == {"url": "x"}


@pytest.mark.parametrize(
    ("last", "means"),
    [
        (b'{"status":"failed","error":"no","retryable":false}', (OutcomeKind.FAILED, "job_failed")),
        (b'{"status":"error","error":"out of memory"}', (OutcomeKind.RETRY, "job_failed")),
        (b'{"status":"canceled"}', (OutcomeKind.CANCELED, "canceled")),
        (b'{"error":"out of memory"}', (OutcomeKind.RETRY, "job_failed")),
    ],
)
def test_an_error_inside_a_200_is_an_error(last: bytes, means: tuple[OutcomeKind, str], outcome):
    found = outcome(chunks(data(b'{"piece":"a"}', last)), {})
    assert told(found) == means
    assert b"out of memory" not in last or "out of memory" in found.message


def test_pieces_are_a_list_where_they_are_values(outcome):
    found = outcome(chunks(b'{"n":1}\n{"n":[2]}\n\n{"n":"3"}', kind=LINES), LISTED)
    assert (found.kind, found.result) == (OutcomeKind.DONE, [1, [2], "3"])


LISTED: dict[str, Any] = {"frames": "lines", "piece": "/n", "join": "list", "ends_by": "length"}
RAW_TEXT: dict[str, Any] = {"frames": "raw", "join": "text", "ends_by": "length"}


def test_raw_text_is_whole_however_its_letters_are_cut(outcome):
    text = "größer".encode()
    assert outcome(chunks(*(bytes([one]) for one in text), kind=RAW), RAW_TEXT).result == "größer"


def test_what_is_kept_stands_beside_the_text(outcome):
    keep = {"usage": "/usage", "finish_reason": "/choices/0/finish_reason"}
    last = b'{"choices":[{"delta":{},"finish_reason":"stop"}],"usage":null}'
    usage = b'{"choices":[],"usage":{"total_tokens":3}}'
    found = outcome(chunks(data(delta("Hi"), last, usage, b"[DONE]")), {**OPENAI, "keep": keep})
    assert found.result == {"output": "Hi", "usage": {"total_tokens": 3}, "finish_reason": "stop"}


def test_a_null_is_nothing_that_stands_there(outcome):
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
def test_an_event_that_has_a_name_and_no_data_can_be_the_end_and_is_else_nothing(outcome, join, result):
    stream = {"piece": "", "join": join, "rules": [{"if": {"event": "end"}, "then": "end"}]}
    text = b'event: data\ndata: "a"\n\nevent: ping\n\nevent: data\ndata: "b"\n\nevent: end\n\n'
    assert outcome(chunks(text), stream).result == result
    assert outcome(chunks(text.replace(b"event: end\n\n", b"")), stream).code == "stream_unended"


FINISHING: dict[str, Any] = {
    **OPENAI,
    "keep": {"finish_reason": "/choices/0/finish_reason", "usage": "/usage"},
    "rules": [*OPENAI["rules"], {"if": {"pointer": "/choices/0/finish_reason"}, "then": "last"}],
}
FINISH, USAGE = (
    b'{"choices":[{"delta":{"content":"lo"},"finish_reason":"stop"}]}',
    b'{"choices":[],"usage":{"total":2}}',
)


def test_a_stream_that_ends_in_order_after_its_last_piece_is_whole(outcome):
    text = data(delta("Hel"), FINISH, USAGE)
    whole = {"output": "Hello", "finish_reason": "stop", "usage": {"total": 2}}
    assert outcome(chunks(text), FINISHING).result == whole
    assert outcome(chunks(text + data(b"[DONE]")), FINISHING).result == whole
    without_length = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    assert outcome(closed(without_length + text), FINISHING).result == whole


def test_before_its_last_piece_the_end_of_a_stream_is_a_cut(outcome):
    assert told(outcome(chunks(data(delta("Hel"))), FINISHING)) == CUT
    assert told(outcome(cut(data(delta("Hel"), FINISH)), FINISHING)) == LOST, "its end is not in order"


def test_the_end_of_a_stream_that_has_no_end_names_the_rule_and_what_came(outcome):
    found = outcome(chunks(data(delta("Hel"), delta("lo"))), OPENAI)
    assert (found.code, found.message) == (
        "stream_unended",
        r"The server ended its stream; no event matched the rule for its end (text ^\[DONE\]$); "
        r'the last of 2 events was {"choices":[{"delta":{"content":"lo"}}]}',
    )


def test_the_last_event_with_data_is_the_answer_of_a_stream_whose_end_has_none(outcome):
    stream = {"rules": [{"if": {"event": "end"}, "then": "end"}, {"if": {"event": "message"}, "then": "piece"}]}
    text = b'data: {"status":"success","result":7}\n\nevent: end\n\n'
    assert outcome(chunks(text), stream).result == 7


def test_an_answer_of_another_kind_is_read_whole(outcome):
    assert outcome(answer({"status": "success", "result": 7}), {}).result == 7
    assert told(outcome(answer({"status": "busy"}, 503, Content_Type="text/event-stream"), {})) == (
        OutcomeKind.BUSY,
        "busy",
    )


def test_what_asks_for_a_stream_is_added_unless_the_payload_says_otherwise(scripted, ours):
    there = scripted(lambda _seen: answer({"status": "success"}))
    server = ours(there.url, described({"ask": {"stream": True, "n": 1}}))
    server.submit(Call("job-1", 1, {"n": 2}))
    assert there.seen[0].json == {"stream": True, "n": 2}


# -- passed on -------------------------------------------------------------------------------------------------


def test_pieces_are_passed_on_while_the_server_is_still_at_it(scripted, loop):
    """Each is heard before the next is sent."""
    heard: list[Piece] = []

    def act(sock: Any) -> None:
        sock.sendall(HEAD % SSE)
        for n, text in enumerate(["Hel", "lo"]):
            sock.sendall(chunk(data(delta(text))))
            _until(lambda n=n: len(heard) > n)
        sock.sendall(chunk(data(b"[DONE]")) + END)

    there = scripted(lambda _seen: act)
    live = ServerSession(ServerAdapter(there.url, described(OPENAI)), loop.http, heard.append)
    assert loop.wait_for(live.submit(JOB)).result == "Hello"
    assert [(it.text, it.offset) for it in heard] == [("Hel", 0), ("lo", 3)]


def test_progress_is_passed_on(scripted, loop):
    heard: list[Piece] = []
    there = scripted(lambda _seen: chunks(data(b'{"progress":0.5}', b'{"status":"success","result":1}')))
    live = ServerSession(ServerAdapter(there.url, described({})), loop.http, heard.append)
    assert loop.wait_for(live.submit(JOB)).result == 1
    assert [it.progress for it in heard] == [0.5]


def test_a_poll_says_how_far_a_run_is(scripted, loop):
    heard: list[Piece] = []
    there = scripted(lambda _seen: answer({"status": "processing", "job_id": "r1", "progress": {"percent": 40}}))
    live = ServerSession(ServerAdapter(there.url), loop.http, heard.append)
    assert loop.wait_for(live.status(JOB, "r1")).kind is OutcomeKind.PENDING
    assert [it.progress for it in heard] == [{"percent": 40}]


def test_the_connection_of_a_stream_that_ended_well_is_used_again(scripted, loop):
    there = scripted(lambda _seen: chunks(data(b"[DONE]")))
    server = ServerAdapter(there.url, described(OPENAI))
    for _ in range(3):
        assert loop.wait_for(ServerSession(server, loop.http).submit(JOB)).kind is OutcomeKind.DONE
    assert there.connections == 1


# -- those that lie --------------------------------------------------------------------------------------------


def _until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    assert condition()


def drip(piece: bytes, before: bytes = b"") -> Act:
    """This for ever, a hundred times a second."""

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


def cut(*texts: bytes) -> Act:
    def send(sock: Any) -> None:
        sock.sendall(chunks(*texts, end=b""))
        time.sleep(0.05)  # else the reset overtakes what was sent
        reset(sock)

    return send


UNHEARD, LOST = (OutcomeKind.UNKNOWN, "no_answer"), (OutcomeKind.UNKNOWN, "connection_lost")
GARBAGE, TOO_LARGE = (OutcomeKind.RETRY, "bad_answer"), (OutcomeKind.FAILED, "answer_too_large")
UNENDED, ERROR = (OutcomeKind.RETRY, "stream_unended"), (OutcomeKind.RETRY, "job_failed")
CUT = (OutcomeKind.RETRY, "stream_cut")
BEGUN = data(delta("Hel"))


@pytest.mark.parametrize(
    ("says", "stream", "means"),
    [
        pytest.param(drip(BEGUN), {}, UNHEARD, id="a stream without an end"),
        pytest.param(drip(b": still here\n\n", BEGUN), {"silent_s": 0.2}, UNHEARD, id="heartbeats for ever"),
        pytest.param(drip(b": still here\n\n", BEGUN), {}, UNHEARD, id="heartbeats until its time is over"),
        pytest.param(drip(b"x", BEGUN), {}, UNHEARD, id="a trickle that is no event"),
        pytest.param(chunks(BEGUN, data(b'{"error":{"message":"no memory"}}')), {}, ERROR, id="an error inside"),
        pytest.param(
            chunks(BEGUN, data(b'{"error":{"message":"no memory"}}', b"[DONE]")),
            {},
            ERROR,
            id="an error and an end mark",
        ),
        pytest.param(cut(BEGUN), {}, LOST, id="cut in the middle"),
        pytest.param(chunks(BEGUN), {}, UNENDED, id="ended without its mark"),
        pytest.param(chunks(), {}, CUT, id="nothing at all"),
        pytest.param(cut(BEGUN, b"data: [DONE]\n"), {}, LOST, id="a mark that is cut"),
        pytest.param(chunks(BEGUN, b"data: [DON"), {}, GARBAGE, id="half a mark"),
        pytest.param(chunks(BEGUN, b'data: {"error":"no memory"}'), {}, ERROR, id="an error that nothing ends"),
        pytest.param(chunks(BEGUN, data(b"<html>502</html>")), {}, GARBAGE, id="a page in an event"),
        pytest.param(chunks(BEGUN, b"<html>502</html>\n\n"), {}, UNENDED, id="a page in the middle"),
        pytest.param(chunks(delta("Hel") + b"\n", kind=SSE), {}, UNENDED, id="lines instead of events"),
        pytest.param(chunks(b"<html>", kind=b"text/html"), {}, GARBAGE, id="a page instead of a stream"),
        pytest.param(chunks(data(b'{"choices":[{"delta":{"content":7}}]}')), {}, GARBAGE, id="a piece that is no text"),
        pytest.param(chunks(*[b"data: " + b"x" * 60_000] * 2), {}, TOO_LARGE, id="a huge piece"),
        pytest.param(chunks(*[BEGUN * 1000] * 3), {}, TOO_LARGE, id="a text that is too long"),
        pytest.param(chunks(BEGUN), {"ends_by": "mark", "join": "last", "rules": []}, UNENDED, id="no last event"),
        pytest.param(
            closed(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\nHel"),
            RAW_TEXT,
            CUT,
            id="an end that cannot be told from a cut",
        ),
    ],
)
def test_a_stream_that_lies_costs_what_it_should(
    says: Act, stream: dict[str, Any], means: tuple[OutcomeKind, str], outcome
):
    # Short only where nothing else ends it: this process may stand still for longer before it is connected.
    deadline_s = 2.0 if means == UNHEARD else 30.0
    found = outcome(says, {**OPENAI, **stream} if "frames" not in stream else stream, deadline_s=deadline_s)
    assert told(found) == means


def test_heartbeats_end_with_the_longest_silence(scripted, loop):
    there = scripted(lambda _seen: drip(b": still here\n\n", BEGUN))
    live = ServerSession(ServerAdapter(there.url, described({**OPENAI, "silent_s": 0.2})), loop.http)
    began = time.monotonic()
    assert told(loop.wait_for(live.submit(Call("job-1", 1, {}, deadline_s=40.0)))) == UNHEARD
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("more", [data(delta("and more")), b": still here\n\n"])
def test_what_comes_after_the_end_changes_nothing(more: bytes, outcome):
    began = time.monotonic()
    found = outcome(drip(more, BEGUN + data(b"[DONE]")), OPENAI, deadline_s=30.0)
    assert (found.kind, found.result) == (OutcomeKind.DONE, "Hel")
    assert time.monotonic() - began < 15


def test_a_connection_that_is_cut_after_the_end_changes_nothing(outcome):
    assert outcome(cut(BEGUN, data(b"[DONE]")), OPENAI).result == "Hel"


def test_a_server_that_is_not_listened_to_any_longer_may_be_at_it_still(outcome):
    found = outcome(drip(data(b"<html>")), OPENAI, deadline_s=30.0)
    assert told(found) == GARBAGE and found.server_still_running


def test_a_stream_of_too_many_values_is_none(outcome, monkeypatch):
    monkeypatch.setattr("tasks.servers.stream_reader.MAX_PIECES", 3)
    assert told(outcome(chunks(b'{"n":1}\n' * 4, kind=LINES), LISTED)) == TOO_LARGE


def test_a_value_that_is_too_deep_is_no_result(outcome):
    deep = b'{"n":' + b"[" * 210 + b"]" * 210 + b"}\n"
    assert told(outcome(chunks(deep, kind=LINES), LISTED)) == (OutcomeKind.FAILED, "answer_too_deep")
