"""Connections, threads and the reading of requests."""

from tests.nightly.mutants.operators import Mutant, always, never, swap

MUTANTS = [
    Mutant(
        "an incomplete body passes",
        "app.request_json:read_body",
        never("announced is not None and len(body) != announced"),
        kills=["test_an_incomplete_request_body_is_refused"],
        breaks="framing",
        still="test_a_submitted_job_is_in_the_database_before_the_response",
    ),
    Mutant(
        "a batch may be of any size",
        "app.request_json:_parse_item",
        never("index == MAX_BATCH_JOBS"),
        kills=["test_a_thousand_jobs_are_a_batch"],
        breaks="limits",
        still="test_a_submitted_job_is_in_the_database_before_the_response",
    ),
    Mutant(
        "one owner takes all threads",
        "app.server.fair_pool:FairPool.run",
        swap(
            "self.has_room and self._held[owner] < self.share and owner not in self._waiting",
            "self.has_room and owner not in self._waiting",
        ),
        kills=["test_no_owner_holds_more_than_its_share"],
        breaks="limits",
        still="test_the_waiting_calls_of_one_owner_are_limited",
    ),
    Mutant(
        "one owner's waiting connections have no limit",
        "app.server.fair_pool:FairPool._turn",
        never("len(self._waiting.get(owner, ()))"),
        kills=["test_the_waiting_calls_of_one_owner_are_limited"],
        breaks="limits",
        still="test_no_owner_holds_more_than_its_share",
    ),
    Mutant(
        "any HTTP version is taken for 1.1",
        "app.server.wsgi:validate_head",
        swap('version not in ("1.0", "1.1")', "False"),
        kills=["test_an_ambiguous_request_is_refused_and_no_later_request_is_parsed"],
        breaks="framing",
        still="test_an_answer_to_head_has_no_body",
    ),
    Mutant(
        "a response header can begin another header",
        "app.server.wsgi:_encode_header",
        always("value.isprintable()"),
        kills=["test_a_line_break_in_a_response_header_starts_no_new_header"],
        breaks="framing",
        still="test_an_answer_to_head_has_no_body",
    ),
    Mutant(
        "a transfer coding before chunked is ignored",
        "app.server.wsgi:validate_head",
        swap('codings != [b"chunked"] or version == "1.0"', "False"),
        kills=["test_an_ambiguous_request_is_refused_and_no_later_request_is_parsed"],
        breaks="framing",
        still="test_an_answer_to_head_has_no_body",
    ),
    Mutant(
        "events that occur while the database is read are lost",
        "app.server.event_stream:EventStream._send_missed",
        swap("yield await self._buffered_text()", "self._buffered = []"),
        kills=["test_events_stored_during_a_slow_read_are_sent_once_and_in_order"],
        breaks="no lost event",
        still="test_a_new_stream_sends_only_new_events_that_match_its_filter",
    ),
    Mutant(
        "the number of streams is not limited",
        "app.server.application:PlaceLimit.take",
        swap("self.taken.total() < self.most and self.taken[account] < self.share", "True"),
        kills=["test_the_number_of_streams_is_limited_per_tenant_and_in_total_and_a_closed_one_is_freed"],
        breaks="limits",
        still="test_a_new_stream_sends_only_new_events_that_match_its_filter",
    ),
    Mutant(
        "a stream outlives its key",
        "app.server.application:WebApplication._refresh_keys",
        never("cache.is_still_valid"),
        kills=["test_a_stream_ends_when_its_key_is_removed_and_no_other_does"],
        breaks="authorization",
        still="test_a_tenant_receives_the_events_of_its_own_jobs_and_an_administrator_of_all",
    ),
]
