"""Guards, each taken out once: with any of them gone, a test must fail.

    python -m tests.faults.mutants                # all of them, as a table; exit code 1 if one survives
    python -m tests.faults.mutants renew seize    # those whose names contain a word

To add a guard: a Mutant in MUTANTS whose `old` stands exactly once in its file, and the tests that fail when it is
replaced by `new`.  Each of them must fail, and `still` must pass, so that a mutant that breaks everything proves
nothing.  The packages are copied, so the tree that you work in is never touched.
"""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.mutant import (
    CALLBACK,
    GUARDS,
    HOOKS,
    IDENTITY,
    LEASES,
    MAINTENANCE,
    POLICIES,
    RECORD,
    SERVERS,
    SUBMIT,
    USES,
    Mutant,
)
from tests.faults.mutants_acts import ACTS
from tests.faults.mutants_away import AWAY
from tests.faults.mutants_batches import BATCHES
from tests.faults.mutants_celery import CELERY
from tests.faults.mutants_descriptions import DESCRIPTIONS
from tests.faults.mutants_door import DOOR
from tests.faults.mutants_events import EVENTS
from tests.faults.mutants_figures import FIGURES
from tests.faults.mutants_gates import GATES
from tests.faults.mutants_hints import HINTS
from tests.faults.mutants_hooks import PACED
from tests.faults.mutants_killed import KILLED
from tests.faults.mutants_lines import LINES
from tests.faults.mutants_loop import LOOP
from tests.faults.mutants_moved import MOVED
from tests.faults.mutants_offers import OFFERS
from tests.faults.mutants_page import PAGE
from tests.faults.mutants_receivers import RECEIVERS
from tests.faults.mutants_record import KEPT
from tests.faults.mutants_removal import REMOVAL
from tests.faults.mutants_rest import REST
from tests.faults.mutants_rights import RIGHTS
from tests.faults.mutants_room import ROOM
from tests.faults.mutants_run import RUN
from tests.faults.mutants_scripts import SCRIPTS
from tests.faults.mutants_secrets import SECRETS
from tests.faults.mutants_seen import SEEN
from tests.faults.mutants_servers import REFERENCE_SERVER
from tests.faults.mutants_spoken import SPOKEN
from tests.faults.mutants_streams import STREAMS
from tests.faults.mutants_tokens import TOKENS
from tests.faults.mutants_traces import TRACES
from tests.faults.mutants_upkeep import UPKEEP
from tests.house.tree import PACKAGES

REPO = Path(__file__).resolve().parents[2]
_COPIED = (*PACKAGES, "tests", "docs", "celeryconfig.py", "setup.cfg")
_LONGEST_S = 180

MUTANTS = [
    *RIGHTS,
    *MOVED,
    *ROOM,
    *AWAY,
    *KEPT,
    *OFFERS,
    *GATES,
    *ACTS,
    *DOOR,
    *DESCRIPTIONS,
    *REMOVAL,
    *REFERENCE_SERVER,
    *SPOKEN,
    *RUN,
    *HINTS,
    *LINES,
    *PACED,
    *LOOP,
    *CELERY,
    *UPKEEP,
    *KILLED,
    *SCRIPTS,
    *SECRETS,
    *REST,
    *STREAMS,
    *TOKENS,
    *TRACES,
    *EVENTS,
    *RECEIVERS,
    *SEEN,
    *FIGURES,
    *PAGE,
    *BATCHES,
    # -- the record ------------------------------------------------------------------------------------------
    Mutant(
        "a transition asks for no state",
        "JOB-1",
        "slotkeeper/jobs/statements.py",
        'statement = update(jobs).where(jobs.c.id == bindparam("p_id"), in_state(state))',
        'statement = update(jobs).where(jobs.c.id == bindparam("p_id"))',
        (f"{RECORD}test_job_1_a_final_state_is_never_left", f"{RECORD}test_a_job_is_revived_once_however_many_ask"),
    ),
    Mutant(
        "a settle asks for no token",
        "LEASE-3",
        "slotkeeper/jobs/statements.py",
        'statement = statement.where(jobs.c.attempt == bindparam("p_attempt"))',
        "pass",
        (
            f"{RECORD}test_lease_3_a_settle_under_an_old_token_changes_nothing",
            f"{MAINTENANCE}test_a_worker_that_wakes_too_late_can_neither_renew_nor_release_nor_settle",
        ),
    ),
    Mutant(
        "the token does not grow",
        "LEASE-2",
        "slotkeeper/jobs/statements.py",
        '"attempt": jobs.c.attempt + 1,',
        '"attempt": 1,',
        (f"{RECORD}test_lease_2_the_token_grows_with_every_start",),
    ),
    Mutant(
        "a server's id is stored under any token",
        "LEASE-3",
        "slotkeeper/jobs/store.py",
        """        in_state(State.RUNNING),
        jobs.c.attempt == bindparam("p_attempt"),
""",
        """        in_state(State.RUNNING),
        bindparam("p_attempt") > 0,
""",
        (f"{RECORD}test_lease_3_a_remote_id_is_stored_only_under_the_current_token",),
    ),
    Mutant(
        "events are written after the commit",
        "JOB-2",
        "slotkeeper/db/group_commit.py",
        """                    mark = transaction.flush_inserts()
                except BaseException:
                    self._writer.undo(connection)
                    raise
                try:
                    self._writer.commit(connection)
""",
        """                    mark = TransactionMark(None, None)
                except BaseException:
                    self._writer.undo(connection)
                    raise
                try:
                    self._writer.commit(connection)
                    with self.engine.begin() as transaction.connection:
                        transaction.flush_inserts()
""",
        (
            f"{RECORD}test_job_2_a_transition_whose_event_cannot_be_written_did_not_happen",
            f"{RECORD}test_job_2_an_end_whose_webhook_cannot_be_written_did_not_happen",
        ),
    ),
    Mutant(
        "a key names any tenant's job",
        "idempotency",
        "slotkeeper/jobs/acceptance.py",
        '(idempotency_keys.c.tenant == bindparam("p_tenant")) & ',
        "",
        (f"{SUBMIT}test_a_key_belongs_to_its_tenant",),
    ),
    Mutant(
        "a key stands for any request",
        "idempotency",
        "slotkeeper/jobs/acceptance.py",
        "if known.fingerprint != job.fingerprint:",
        "if known.fingerprint is None:",
        (f"{SUBMIT}test_the_same_key_with_another_request_is_a_conflict_that_names_the_job",),
    ),
    Mutant(
        "a key is kept for ever",
        "idempotency",
        "slotkeeper/jobs/acceptance.py",
        "if known is None or known.expires_ms <= now_ms:",
        "if known is None:",
        (f"{SUBMIT}test_within_the_window_the_key_names_the_job_and_after_it_is_fresh_work",),
    ),
    Mutant(
        "what waits for long is removed",
        "no silent drops",
        "slotkeeper/outbox/retention.py",
        "old = and_(jobs.c.finished_ms < ended_before_ms, ~webhook_messages",
        "old = and_(jobs.c.created_ms < ended_before_ms, ~webhook_messages",
        (f"{GUARDS}test_a_job_that_waits_for_a_year_is_not_removed",),
    ),
    Mutant(
        "a job is removed whose message is owed",
        "HOOK-1",
        "slotkeeper/outbox/webhook_messages.py",
        '.where(messages.c.job_id == jobs.c.id, unindexed(messages.c.state) == "pending")',
        '.where(messages.c.job_id == jobs.c.id, unindexed(messages.c.state) == "never")',
        (f"{RECORD}test_hook_1_a_job_whose_message_is_still_owed_is_not_purged",),
    ),
    Mutant(
        "only recent deadlines are looked for",
        "time",
        "slotkeeper/jobs/store.py",
        '_PASSED = "deadline_ms <= :p_now"',
        '_PASSED = "deadline_ms <= :p_now AND deadline_ms > :p_now - 10000"',
        (f"{MAINTENANCE}test_a_deadline_ends_a_job_in_every_state_however_late_somebody_looks",),
    ),
    Mutant(
        "a message is tried before its time",
        "HOOK-1",
        "slotkeeper/outbox/webhook_messages.py",
        '_TIME_HAS_COME = messages.c.next_ms <= bindparam("p_now")',
        '_TIME_HAS_COME = messages.c.next_ms + bindparam("p_now") > 0',
        (f"{HOOKS}test_only_one_at_a_time_may_try", f"{HOOKS}test_a_message_is_not_tried_before_its_time"),
    ),
    Mutant(
        "a server's id is taken to another server",
        "LEASE-3",
        "slotkeeper/jobs/statements.py",
        'return case((jobs.c.server == bindparam("p_server"), column), else_=None)',
        "return column",
        (f"{MAINTENANCE}test_on_another_server_a_job_is_run_anew",),
    ),
    Mutant(
        "a doubled submit is booked twice",
        "JOB-3",
        "slotkeeper/jobs/store.py",
        'add_to_counter(tx, "doubled")',
        "pass",
        (f"{GUARDS}test_job_3_the_books_balance_when_ids_come_twice_and_old_jobs_are_removed",),
    ),
    Mutant(
        "what is removed is not booked",
        "JOB-3",
        "slotkeeper/outbox/retention.py",
        'add_to_counter(tx, f"purged.{state}", number)',
        "pass",
        (f"{GUARDS}test_job_3_the_books_balance_when_ids_come_twice_and_old_jobs_are_removed",),
    ),
    # -- leases ----------------------------------------------------------------------------------------------
    Mutant(
        "a lease is known by its owner alone",
        "LEASE-4",
        "routing/lua/lib/lease.lua",
        "lease and lease.name == name and lease.owner == owner",
        "lease and lease.owner == owner",
        (f"{LEASES}test_nobody_else_renews", f"{LEASES}test_nobody_else_releases"),
    ),
    Mutant(
        "a lease is known by its name alone",
        "LEASE-4",
        "routing/lua/lib/lease.lua",
        "lease and lease.name == name and lease.owner == owner",
        "lease and lease.name == name",
        (f"{LEASES}test_another_worker_cannot_claim_what_is_claimed", f"{LEASES}test_nobody_else_releases"),
        still=f"{LEASES}test_a_slot_without_a_job_stays_free",
    ),
    Mutant(
        "a claim does not ask whether the offer is open",
        "LEASE-1",
        "routing/lua/claim.lua",
        'if not holds(lease, offer.lease, "") then return false end',
        "if not lease or lease.name ~= offer.lease then return false end",
        (f"{LEASES}test_another_worker_cannot_claim_what_is_claimed",),
    ),
    Mutant(
        "anybody renews",
        "LEASE-4",
        "routing/lua/renew.lua",
        "if is_held(job, lease.name, owner) then",
        'if redis.call("EXISTS", lease_key(job)) == 1 then',
        (f"{LEASES}test_nobody_else_renews",),
    ),
    Mutant(
        "a lost lease is made anew by its renewal",
        "LEASE-1",
        "routing/lua/renew.lua",
        'answer = is_complete and "lost" or "unknown"',
        'redis.call("ZADD", LEASES, exact(now + lease_ms), job)\n    answer = is_complete and "lost" or "unknown"',
        (f"{LEASES}test_nobody_else_renews",),
    ),
    Mutant(
        "anybody releases",
        "LEASE-4",
        "routing/lua/release.lua",
        "if not holds(was, it.lease.name, it.lease.owner) then return 0 end",
        "if not was then return 0 end",
        (
            f"{LEASES}test_nobody_else_releases",
            f"{MAINTENANCE}test_a_worker_that_wakes_too_late_can_neither_renew_nor_release_nor_settle",
        ),
    ),
    Mutant(
        "anybody's lease is seized",
        "LEASE-4",
        "routing/lua/seize.lua",
        'if not is_held(job, lease.name, lease.owner) then return "lost" end',
        "",
        (f"{LEASES}test_only_the_lease_that_was_seen_can_be_seized",),
    ),
    Mutant(
        "a lease that was renewed is seized as expired",
        "LEASE-4",
        "routing/lua/seize.lua",
        'if only_expired and tonumber(redis.call("ZSCORE", LEASES, job) or "0") > now then return "lost" end',
        "",
        (
            f"{LEASES}test_a_lease_that_was_renewed_meanwhile_is_not_seized_as_expired",
            f"{MAINTENANCE}test_a_worker_that_renews_between_the_reapers_look_and_its_grip_is_not_reaped",
        ),
    ),
    Mutant(
        "the reaper ends whatever run there is",
        "LEASE-3",
        "routing/maintenance/reaper.py",
        "if job is not None and job.state is State.RUNNING and (job.lease == lease.stored_text or lease.owner == _REAPER):",
        "if job is not None and job.state is State.RUNNING:",
        (f"{GUARDS}test_a_lease_that_outlived_its_run_does_not_end_the_next_one",),
    ),
    Mutant(
        "a lease is restored for a job that waits",
        "LEASE-1",
        "routing/lua/restore.lua",
        "if not waits and ",
        "if ",
        (f"{GUARDS}test_a_job_that_waits_again_is_given_no_lease_by_a_late_restore",),
    ),
    Mutant(
        "what a dead reaper held is held for ever",
        "LEASE-1",
        "routing/maintenance/reaper.py",
        "(job.lease == lease.stored_text or lease.owner == _REAPER):",
        "job.lease == lease.stored_text:",
        (f"{MAINTENANCE}test_a_reaper_that_dies_after_its_grip_is_followed_by_the_next",),
    ),
    Mutant(
        "a waiting job that the room lost stays lost",
        "QUEUE-1",
        "routing/maintenance/sweep.py",
        "found += _fill(dispatcher, fleet)",
        "pass",
        (f"{MAINTENANCE}test_queue_1_a_queued_job_that_the_room_has_lost_is_brought_back_to_its_place",),
    ),
    Mutant(
        "a lease that Redis lost stays lost",
        "LEASE-1",
        "routing/maintenance/sweep.py",
        "found, rooms = restore_leases.restore(dispatcher), ",
        "found, rooms = 0, ",
        (f"{MAINTENANCE}test_a_running_job_whose_lease_is_lost_gets_it_back",),
    ),
    # -- what servers report ---------------------------------------------------------------------------------
    Mutant(
        "a young lease is held against the server's ids",
        "identity",
        "routing/maintenance/server_report.py",
        "if not lease.names & running and lease.age_ms >= MIN_AGE_MS",
        "if not lease.names & running",
        (
            f"{IDENTITY}test_a_lease_younger_than_five_seconds_is_no_ghost",
            f"{SERVERS}test_a_run_younger_than_five_seconds_is_never_suspected",
        ),
    ),
    Mutant(
        "a young lease is held against the server's count",
        "identity",
        "routing/maintenance/server_report.py",
        "if active == 0 and lease.age_ms >= MIN_AGE_MS",
        "if active == 0",
        (f"{IDENTITY}test_a_lease_younger_than_five_seconds_is_no_ghost",),
    ),
    Mutant(
        "a count above zero makes stale",
        "identity",
        "routing/maintenance/server_report.py",
        "if active == 0 and lease.age_ms",
        "if active < len(leases) and lease.age_ms",
        (f"{SERVERS}test_only_a_report_that_says_so_makes_a_suspect",),
    ),
    Mutant(
        "the count beats the ids",
        "identity",
        "routing/maintenance/server_report.py",
        "if report.job_ids is not None:",
        "if report.job_ids is not None and report.active_jobs is None:",
        (f"{SERVERS}test_only_a_report_that_says_so_makes_a_suspect",),
    ),
    Mutant(
        "a server that is down is taken at its word",
        "identity",
        "routing/maintenance/server_report.py",
        "if not report.up:",
        "if report.up is None:",
        (f"{SERVERS}test_only_a_report_that_says_so_makes_a_suspect",),
    ),
    Mutant(
        "stale are freed at the first look",
        "identity",
        "routing/maintenance/server_checks.py",
        "for job in find_stale_runs(dispatcher, reports) if _run(job) in known)",
        "for job in find_stale_runs(dispatcher, reports))",
        (f"{SERVERS}test_a_later_run_of_a_suspect_is_no_suspect",),
    ),
    Mutant(
        "the second look is not asked",
        "identity",
        "routing/maintenance/server_checks.py",
        "for job in find_stale_runs(dispatcher, reports) if _run(job) in known)",
        "for job in before)",
        (f"{SERVERS}test_a_suspicion_that_the_second_look_does_not_confirm_frees_nothing",),
    ),
    Mutant(
        "a living worker's run is freed at once",
        "identity",
        "routing/maintenance/server_checks.py",
        "for job in stale if (server.name, job.id) in silent)",
        "for job in stale)",
        (f"{SERVERS}test_a_ghost_is_freed_at_the_first_look_only_if_its_worker_is_silent_too",),
    ),
    Mutant(
        "a run that its server may just have ended is given up",
        "identity",
        "routing/maintenance/server_checks.py",
        "    if job.remote_id is None:\n",
        "    if job.remote_id is not True:\n",
        (
            "tests/faults/test_identity.py::"
            "test_a_run_that_has_an_id_at_its_server_is_no_ghost_its_result_is_asked_for_by_that_id",
        ),
    ),
    # -- budgets ---------------------------------------------------------------------------------------------
    Mutant(
        "a poison job never ends",
        "budgets",
        "routing/dispatch/verdict.py",
        "return Reason.CRASHES_EXHAUSTED if crashes + 1 >= config.max_crashes else lost",
        "return lost",
        (
            f"{POLICIES}test_the_last_of_max_crashes_makes_a_job_dead",
            f"{MAINTENANCE}test_a_job_under_which_workers_keep_dying_is_set_aside_as_poison",
        ),
    ),
    Mutant(
        "a job is retried for ever",
        "budgets",
        "routing/dispatch/verdict.py",
        "Reason.RETRIES_EXHAUSTED if failures >= config.max_retries else Reason.SERVER_ERROR",
        "Reason.SERVER_ERROR",
        (
            f"{POLICIES}test_a_job_is_run_once_and_then_retried_as_often_as_allowed",
            f"{USES}test_after_max_retries_a_job_is_dead_and_revived_it_has_all_of_them_again",
        ),
    ),
    Mutant(
        "a busy server costs the job a retry",
        "budgets",
        "slotkeeper/jobs/states.py",
        "(State.RUNNING, Reason.SERVER_BUSY): Edge(State.QUEUED, _SETTLE, Budget.WAITS)",
        "(State.RUNNING, Reason.SERVER_BUSY): Edge(State.QUEUED, _SETTLE, Budget.FAILURES)",
        (
            f"{POLICIES}test_waiting_for_capacity_never_spends_an_attempt",
            f"{USES}test_a_busy_server_costs_nothing_the_slot_has_a_cooldown_and_another_is_tried_at_once",
        ),
    ),
    Mutant(
        "a server that cannot be reached costs the job a crash",
        "budgets",
        "slotkeeper/jobs/states.py",
        "(State.RUNNING, Reason.SERVER_UNREACHABLE): Edge(State.QUEUED, _SETTLE, Budget.WAITS)",
        "(State.RUNNING, Reason.SERVER_UNREACHABLE): Edge(State.QUEUED, _SETTLE, Budget.CRASHES)",
        (f"{USES}test_a_day_without_its_server_costs_a_job_nothing",),
    ),
    # -- the outside -----------------------------------------------------------------------------------------
    Mutant(
        "any token will do",
        "LEASE-3",
        "tasks/callbacks.py",
        "return any(hmac.compare_digest(shown.encode(), one) for one in valid)",
        "return bool(shown)",
        (f"{CALLBACK}test_a_forged_push_changes_nothing",),
    ),
    Mutant(
        "a token is good for all attempts",
        "LEASE-3",
        "tasks/callbacks.py",
        'f"callback {job_id} {attempt}"',
        'f"callback {job_id}"',
        (f"{CALLBACK}test_a_superseded_attempt_cannot_end_the_next",),
    ),
    Mutant(
        "a script that was slow is sent again",
        "LEASE-1",
        "slotkeeper/redis/scripts.py",
        "retry=Retry(NoBackoff(), 0),",
        "retry=Retry(NoBackoff(), 3),",
        (f"{GUARDS}test_lease_1_a_script_whose_answer_was_lost_has_run_once",),
    ),
    Mutant(
        "a run may take ten minutes whatever its model allows",
        "runs",
        "tasks/worker/server_call.py",
        "ends = began + config.max_poll_time * 1000",
        "ends = began + 600 * 1000",
        (f"{GUARDS}test_a_run_may_take_as_long_as_its_own_model_allows",),
    ),
]


@dataclass(frozen=True)
class Verdict:
    """What came of one mutant: the tests that ought to have failed and did not, and whether `still` broke."""

    mutant: Mutant
    survived: tuple[str, ...]
    broken: bool
    output: str

    @property
    def killed(self) -> bool:
        return not self.survived and not self.broken

    @property
    def words(self) -> str:
        if self.killed:
            return "killed"
        return "breaks everything" if self.broken else "SURVIVED " + ", ".join(self.survived)


def try_out(mutant: Mutant) -> Verdict:
    """Run the mutant's tests on a copy in which the guard is missing."""
    with _copy() as folder:
        path = folder / mutant.file
        path.write_text(replaced(mutant, path.read_text("utf-8")), "utf-8")
        passed, failed, output = _run(folder, [mutant.still, *mutant.tests], postgres=mutant.postgres)
    survived = tuple(test for test in mutant.tests if test not in failed)
    return Verdict(mutant, survived, mutant.still not in passed or mutant.still in failed, output)


def healthy(mutants: Sequence[Mutant]) -> str:
    """Run the tests of all these mutants on an unaltered copy; answers what fails there, empty: nothing."""
    wanted = sorted({test for mutant in mutants for test in (mutant.still, *mutant.tests)})
    with _copy() as folder:
        passed, failed, output = _run(folder, wanted, postgres=any(mutant.postgres for mutant in mutants))
    return output if failed or set(wanted) - passed else ""


def replaced(mutant: Mutant, text: str) -> str:
    """The file without the guard.  Raises ValueError unless the guard stands there exactly once."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name!r}: its text stands {text.count(mutant.old)} times in {mutant.file}, not once")
    return text.replace(mutant.old, mutant.new)


@contextmanager
def _copy() -> Iterator[Path]:
    with TemporaryDirectory(prefix="mutant-") as name:
        for part in _COPIED:
            source, target = REPO / part, Path(name) / part
            if source.is_dir():
                shutil.copytree(source, target)  # With what is compiled of it, which stays good but for one file.
            else:
                shutil.copy(source, target)
        yield Path(name)


def _run(folder: Path, tests: Sequence[str], *, postgres: bool) -> tuple[set[str], set[str], str]:
    """The tests that passed and those that failed, by their names without parameters, and what was said."""
    report = folder / "report.xml"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLOTKEEPER_", "PYTEST_"))}
    env |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *([] if postgres else ["-m", "not postgres"]),
    ]
    command += [f"--basetemp={folder / 'temp'}", f"--junitxml={report}", *tests]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=_LONGEST_S)
    passed, failed = set[str](), set[str]()
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name'].partition('[')[0]}"
        bad = case.find("failure") is not None or case.find("error") is not None
        (failed if bad else passed).add(name)
    return passed, failed, done.stdout[-4000:] + done.stderr[-2000:]


def main(words: Sequence[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    problem = healthy(chosen)
    if problem:
        sys.stdout.write(f"With all guards in place a test fails:\n{problem}\n")
        return 2
    killed = 0
    for mutant in chosen:
        verdict = try_out(mutant)
        killed += verdict.killed
        sys.stdout.write(f"{mutant.breaks:16} {mutant.name:58} {verdict.words}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{killed} of {len(chosen)} mutants are killed\n")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
