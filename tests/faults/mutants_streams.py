"""Guards of streams and of waiting."""

from tests.faults.mutant import Mutant

TAIL = "tests/contracts/test_record_tail.py::"
STREAM = "tests/unit/web/test_streams.py::"
READ = f"{TAIL}test_what_happened_before_is_not_told_and_what_happens_is_told_once"
FOLLOWED = f"{STREAM}test_a_stream_begins_now_and_tells_what_is_wanted"

STREAMS = [
    Mutant(
        "a number that commits late is passed over",
        "no event is passed over",
        "slotkeeper/outbox/event_reader.py",
        "        if self._doubt.writers:\n            return rows[:sure]",
        "        if False:\n            return rows[:sure]",
        (f"{TAIL}test_a_number_whose_transaction_commits_late_is_waited_for",),
        still=READ,
        postgres=True,
    ),
    Mutant(
        "whoever writes now is waited for, too",
        "no event is held up",
        "slotkeeper/outbox/event_reader.py",
        "self._doubt.writers &= self._writers(connection)",
        "self._doubt.writers = self._writers(connection)",
        (f"{TAIL}test_who_writes_after_a_number_was_missed_holds_nothing_up",),
        still=READ,
        postgres=True,
    ),
    Mutant(
        "reading begins while somebody writes",
        "no event is passed over",
        "slotkeeper/outbox/event_reader.py",
        "            while writing:",
        "            while False:",
        (f"{TAIL}test_reading_begins_when_those_have_ended_that_were_writing",),
        still=READ,
        postgres=True,
    ),
    Mutant(
        "an id that there never was is one",
        "a gap is told",
        "slotkeeper/outbox/event_reader.py",
        "return removed <= after <= max(last, removed)",
        "return removed <= after",
        (f"{STREAM}test_of_a_record_that_was_restored_a_later_id_is_a_gap",),
        still=FOLLOWED,
    ),
    Mutant(
        "a tenant follows all",
        "tenants are apart",
        "app/api/stream_views.py",
        "EventFilter(None if mine.admin else mine.name,",
        "EventFilter(None,",
        (f"{STREAM}test_a_tenant_follows_its_own_jobs_and_an_administrator_all",),
        still=FOLLOWED,
    ),
    Mutant(
        "what is seen before its turn is told before its turn",
        "no event is passed over",
        "app/server/event_stream.py",
        "it for it in events if it.number <= target and",
        "it for it in events if",
        (f"{STREAM}test_what_is_seen_before_its_turn_is_not_told_before_its_turn",),
        still=FOLLOWED,
        postgres=True,
    ),
    Mutant(
        "what happened while the record was read is forgotten",
        "no event is passed over",
        "app/server/event_stream.py",
        "        self._target = None\n        yield await self._kept_text()",
        "        self._target = None\n        self._kept = []",
        (f"{STREAM}test_what_happens_while_the_record_is_read_is_told_once_and_in_order",),
        still=FOLLOWED,
    ),
    Mutant(
        "streams have no bound",
        "bounds",
        "app/server/application.py",
        "free = self.taken.total() < self.most and self.taken[account] < self.share",
        "free = True",
        (f"{STREAM}test_a_tenant_and_all_have_so_many_streams_and_who_leaves_frees_its_own",),
        still=FOLLOWED,
    ),
    Mutant(
        "who does not read is sent more and more",
        "bounds",
        "app/server/event_stream.py",
        "if self._target is None and self._unsent > _MOST_UNSENT:",
        "if False:",
        (f"{STREAM}test_who_does_not_read_is_closed_and_others_are_not_kept",),
        still=FOLLOWED,
    ),
    Mutant(
        "who leaves keeps its place",
        "bounds",
        "app/server/application.py",
        "            self.taken[account] -= free\n",
        "            pass\n",
        (
            f"{STREAM}test_a_tenant_and_all_have_so_many_streams_and_who_leaves_frees_its_own",
            f"{STREAM}test_beyond_the_bound_nobody_waits_and_who_leaves_makes_room",
        ),
        still=FOLLOWED,
    ),
    Mutant(
        "a job that ended before anybody waited is waited for",
        "waiting ends with the job",
        "app/server/event_feed.py",
        "        self._asked.add(job_id)\n",
        "",
        (f"{STREAM}test_a_job_that_ended_just_before_is_not_waited_for",),
        still=FOLLOWED,
    ),
]
