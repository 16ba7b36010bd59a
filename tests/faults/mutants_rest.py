"""Guards of what an installation does without being asked: when it starts, and so that it costs little at rest."""

from tests.faults.mutant import Mutant

_CANARY = "tests/contracts/test_processes.py::"
_LOADED = "tests/unit/test_what_is_loaded.py::"
_MIGRATIONS = "tests/migrations/test_migrations.py::"
_SUPERVISOR = "tests/unit/cli/test_supervisor.py::"
_BEAT = "tests/unit/test_embedded_beat.py::"
_NEWS = "tests/contracts/test_record_lookout.py::"
_SENT = "tests/faults/test_deliveries.py::"
_SPREAD = "tests/contracts/test_record_receivers.py::"
_RELAY = "tests/faults/test_relay.py::"
_WORKERS = "tests/faults/test_workers.py::"

REST = [
    Mutant(
        "a worker goes on without its beat",
        "SLOT-2",
        "tasks/embedded_beat.py",
        "state.should_stop = 1",
        "state.should_stop = None",
        (f"{_BEAT}test_a_worker_whose_beat_has_ended_ends",),
    ),
    Mutant(
        "what was missed is sent for each time that it was",
        "SLOT-2",
        "tasks/beat.py",
        "now_s // self._every_s > last_s // self._every_s,",
        "now_s // self._every_s >= last_s // self._every_s,",
        (f"{_BEAT}test_what_was_missed_is_sent_once",),
        still=f"{_BEAT}test_beat_measures_time_by_a_clock_that_nobody_sets",
    ),
    Mutant(
        "after a start a room that Redis has lost stays closed until the next sweep is due",
        "SLOT-2",
        "tasks/beat.py",
        "before = _STARTED - timedelta(days=1)",
        "before = _STARTED",
        (f"{_BEAT}test_beat_sends_all_when_it_begins_and_each_task_at_the_multiples_of_its_period",),
        still=f"{_BEAT}test_what_was_missed_is_sent_once",
    ),
    Mutant(
        "what is written while nothing is owed is not looked at",
        "HOOK-1",
        "tasks/webhooks/delivery_loop.py",
        "        self._lookout.on_change(self._hear)\n",
        "",
        (f"{_SENT}test_what_comes_to_be_owed_while_nothing_was_is_sent",),
        still=f"{_SENT}test_the_process_ends_when_told_to_and_survives_a_database_that_is_away",
    ),
    Mutant(
        "what is owed and not due yet is forgotten until somebody writes",
        "HOOK-1",
        "tasks/webhooks/message_delivery.py",
        "self.has_pending = bool(of_jobs or ready) or self._messages.has_pending()",
        "self.has_pending = bool(of_jobs or ready)",
        (f"{_SENT}test_what_is_due_later_is_sent_though_nobody_writes_to_the_record",),
        still=f"{_SENT}test_what_comes_to_be_owed_while_nothing_was_is_sent",
    ),
    Mutant(
        "a receiver that is left alone for a while is forgotten until somebody writes",
        "HOOK-1",
        "slotkeeper/outbox/fan_out.py",
        " or self._is_any_behind()",
        "",
        (f"{_SPREAD}test_while_a_receiver_is_behind_time_alone_may_bring_it_on",),
        still=f"{_SPREAD}test_while_events_are_withheld_time_alone_may_let_them_be_told",
    ),
    Mutant(
        "events that are withheld are forgotten until somebody writes",
        "HOOK-1",
        "slotkeeper/outbox/fan_out.py",
        " or self._tail.has_gap",
        "",
        (f"{_SPREAD}test_while_events_are_withheld_time_alone_may_let_them_be_told",),
        still=f"{_SPREAD}test_while_a_receiver_is_behind_time_alone_may_bring_it_on",
    ),
    Mutant(
        "a relay that rests hears of nothing",
        "no event is lost",
        "tasks/relay/relay.py",
        "        lookout.on_change(self._news.set)\n",
        "",
        (f"{_RELAY}test_a_relay_that_rests_publishes_what_is_written",),
        still=f"{_RELAY}test_a_relay_rests_only_while_the_cursor_is_its_own_and_all_that_can_be_told_is",
    ),
    Mutant(
        "a relay rests while it withholds events, or another has the cursor",
        "no event is lost",
        "tasks/relay/relay.py",
        "return self._is_told and self._tail is not None and not self._tail.has_gap",
        "return self._is_told",
        (f"{_RELAY}test_a_relay_rests_only_while_the_cursor_is_its_own_and_all_that_can_be_told_is",),
        still=f"{_RELAY}test_a_relay_that_rests_publishes_what_is_written",
    ),
    Mutant(
        "a record that was away and is back has no news",
        "HOOK-1",
        "slotkeeper/db/change_listener.py",
        "before, self._seen = self._seen, None",
        "before = self._seen",
        (f"{_NEWS}test_after_the_record_was_away_there_is_news",),
        still=f"{_NEWS}test_whatever_anybody_commits_is_news_once",
    ),
    Mutant(
        "a lookout that fails looks no more",
        "HOOK-1",
        "slotkeeper/db/change_listener.py",
        '        except Exception:\n            log.exception("lookout_failed")\n            return True\n',
        "        except ZeroDivisionError:\n            raise\n",
        (f"{_NEWS}test_a_lookout_that_fails_takes_it_for_news",),
        still=f"{_NEWS}test_whatever_anybody_commits_is_news_once",
    ),
    Mutant(
        "at a start all processes keep those from their work that jobs wait for",
        "SLOT-2",
        "app/up/launcher.py",
        "while waiting and len(beginning) < at_once:",
        "while waiting:",
        (f"{_SUPERVISOR}test_no_more_processes_begin_at_a_time_than_there_are_processors",),
        still=f"{_SUPERVISOR}test_who_has_a_port_has_begun_when_it_listens_there",
    ),
    Mutant(
        "a process is taken for one of its number that was killed before",
        "SLOT-2",
        "app/up/launcher.py",
        "process_files.remove_stale(role.name, pid)",
        "pass",
        (
            f"{_SUPERVISOR}test_a_process_is_not_taken_for_one_of_its_number_that_was_killed_and_is_named_where_it_does_"
            "not_begin",
        ),
        still=f"{_SUPERVISOR}test_no_more_processes_begin_at_a_time_than_there_are_processors",
    ),
    Mutant(
        "a record that a newer release has migrated is taken for one that needs nothing",
        "JOB-3",
        "migrations/revisions.py",
        "return found == known - followed",
        "return found >= known - followed",
        (f"{_MIGRATIONS}test_a_file_with_any_other_schema_is_left_to_the_migration",),
        still=f"{_MIGRATIONS}test_a_file_with_the_newest_schema_is_current",
    ),
    Mutant(
        "a record that cannot be written is taken for one that needs nothing",
        "JOB-3",
        "migrations/revisions.py",
        '            connection.execute("BEGIN IMMEDIATE")\n',
        "",
        (f"{_MIGRATIONS}test_a_file_that_cannot_be_written_now_is_left_to_the_migration",),
        still=f"{_MIGRATIONS}test_a_file_with_the_newest_schema_is_current",
    ),
    Mutant(
        "a worker that has begun just now is killed when it shall stop, as it waits for its canary",
        "time",
        "tasks/worker/event_loop.py",
        "            asked.cancel()\n",
        "            pass\n",
        (f"{_CANARY}test_a_canary_does_not_keep_its_worker_from_its_end",),
        still=f"{_CANARY}test_a_canary_that_has_come_is_timed",
    ),
    Mutant(
        "a canary that comes after the end of its worker's loop is waited for",
        "time",
        "tasks/worker/event_loop.py",
        "            if self._closed:\n                what.close()",
        "            if not self.loop:\n                what.close()",
        (f"{_CANARY}test_a_canary_does_not_keep_its_worker_from_its_end",),
        still=f"{_CANARY}test_a_canary_that_has_come_is_timed",
    ),
]
