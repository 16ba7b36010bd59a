"""Server sessions that are cut off: the submit ends at once, and polls go on."""

import threading

from routing.dispatch.outcome import OutcomeKind
from tasks.servers import Description, RunDetails, ServerAdapter, ServerSession
from tests.support.scripted import always, answer

DONE = {"status": "success", "result": {"image": "x"}}


def make_call(deadline_s: float = 5.0) -> RunDetails:
    return RunDetails("job-1", 2, {"prompt": "cat"}, deadline_s=deadline_s)


def test_a_submit_that_is_cut_off_ends_at_once_with_an_unknown_outcome(scripted, loop):
    was_received = threading.Event()

    def act(_seen):
        was_received.set()
        return lambda _sock: http_server.stopped.wait()

    http_server = scripted(act)
    rules = [{"if": {"connection": "reset"}, "then": "retry"}]
    resets_are_retried = Description.model_validate({"submit": {"rules": rules}})
    session = ServerSession(ServerAdapter(http_server.url + "/generate", resets_are_retried), loop.http)
    thread = threading.Thread(target=lambda: (was_received.wait(10), loop.soon(session.cut_off)))
    thread.start()
    outcome = loop.wait_for(session.submit(make_call(deadline_s=60.0)))
    thread.join()
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNKNOWN, "cut_short"), "although a reset would be a retry"


def test_a_session_that_is_cut_off_before_its_submit_sends_nothing(scripted, loop):
    http_server = scripted(always(answer(DONE)))
    session = ServerSession(ServerAdapter(http_server.url + "/generate"), loop.http)
    session.cut_off()
    assert loop.wait_for(session.submit(make_call())).kind is OutcomeKind.UNKNOWN
    assert http_server.seen == []


def test_cutting_off_a_session_after_its_response_keeps_the_connection(scripted, loop):
    http_server = scripted(always(answer(DONE)))
    server = ServerAdapter(http_server.url + "/generate")
    session = ServerSession(server, loop.http)
    assert loop.wait_for(session.submit(make_call())).kind is OutcomeKind.DONE
    session.cut_off()
    assert loop.wait_for(ServerSession(server, loop.http).submit(make_call())).kind is OutcomeKind.DONE
    assert http_server.connections == 1


def test_a_session_that_was_cut_off_can_still_poll(scripted, loop):
    http_server = scripted(always(answer({"status": "completed", "result": 1})))
    session = ServerSession(ServerAdapter(http_server.url + "/generate"), loop.http)
    session.cut_off()
    assert loop.wait_for(session.status(make_call(), "r-1")).kind is OutcomeKind.DONE
