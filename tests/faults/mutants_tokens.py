"""Guards of streamed answers, and of what is told of them."""

from tests.faults.mutant import Mutant

STREAMED = "tests/unit/servers/test_streamed.py::"
SAID = "tests/contracts/test_said.py::"
WATCHED = "tests/unit/web/test_streams.py::"
LIES = f"{STREAMED}test_a_stream_that_lies_costs_what_it_should"
KNOWN = f"{STREAMED}test_an_event_is_known_by_its_name"
HEARD = f"{SAID}test_who_watches_hears_what_was_said_before_and_what_is_said_then"

TOKENS = [
    Mutant(
        "a stream without its end mark is a result",
        "half a text is no result",
        "tasks/servers/stream_reader.py",
        '        if self._verdict is None and self._stream.ends_by == "length":',
        "        if self._verdict is None:",
        (LIES,),
        still=KNOWN,
    ),
    Mutant(
        "an end that cannot be told from a cut is one",
        "half a text is no result",
        "tasks/servers/stream_reader.py",
        "        if not _tells_its_length(reply.headers):\n            return _UNENDED\n",
        "",
        (LIES,),
        still=KNOWN,
    ),
    Mutant(
        "heartbeats keep a stream alive",
        "time is bounded",
        "tasks/servers/http_client.py",
        "        if reader.is_silent:\n            self.fail(FailureReason.TIMEOUT)\n        elif",
        "        if",
        (f"{STREAMED}test_heartbeats_end_with_the_longest_silence",),
        still=KNOWN,
    ),
    Mutant(
        "a server that is not listened to any longer is done",
        "SLOT-1",
        "tasks/servers/stream_reader.py",
        '        return Outcome(OutcomeKind.RETRY, code="bad_answer", message=message, server_still_running=True)',
        '        return Outcome(OutcomeKind.RETRY, code="bad_answer", message=message)',
        (f"{STREAMED}test_a_server_that_is_not_listened_to_any_longer_may_be_at_it_still",),
        still=KNOWN,
    ),
    Mutant(
        "who begins to watch while Redis is being connected to hears nothing",
        "told",
        "routing/progress.py",
        "                await channel.subscribe(*began)",
        "                pass",
        (f"{SAID}test_who_begins_to_watch_while_another_has_redis_connected_to_hears_too",),
        still=HEARD,
    ),
    Mutant(
        "what is said while the past is read is told before it",
        "order",
        "routing/progress.py",
        "        if self.buffered is not None:\n            self.buffered.append(said)\n        elif",
        "        if",
        (f"{SAID}test_what_is_said_while_the_past_is_read_waits_for_it",),
        still=HEARD,
    ),
    Mutant(
        "what waits for Redis has no bound",
        "memory is bounded",
        "tasks/worker/progress_publisher.py",
        " or self._waiting + size > MAX_PENDING_CHARS:",
        ":",
        (f"{SAID}test_a_redis_that_does_not_answer_takes_no_memory",),
        still=HEARD,
    ),
    Mutant(
        "a job's end is told before its last words",
        "order",
        "app/server/event_stream.py",
        "if it.ends and self._watcher is not None:",
        "if False:",
        (f"{WATCHED}test_all_that_was_said_is_told_before_the_end",),
        still=f"{WATCHED}test_a_jobs_stream_tells_it_from_the_beginning_and_ends_with_it",
    ),
    Mutant(
        "an event that is nothing but a name is not heard",
        "a stream ends as its server says",
        "tasks/servers/stream_reader.py",
        "if self._data or self._name:",
        "if self._data:",
        (f"{STREAMED}test_an_event_that_has_a_name_and_no_data_can_be_the_end_and_is_else_nothing",),
        still=KNOWN,
    ),
    Mutant(
        "an event that is nothing but a name is a piece",
        "a stream ends as its server says",
        "tasks/servers/stream_reader.py",
        '"piece" if event.data else "skip"',
        '"piece"',
        (f"{STREAMED}test_an_event_that_has_a_name_and_no_data_can_be_the_end_and_is_else_nothing",),
        still=KNOWN,
    ),
]
