"""Guards of descriptions and secrets as parts of a model's configuration, and of runs that go by them."""

from tests.faults.mutant import CALLBACK, Mutant

DESCRIBED = "tests/contracts/test_descriptions.py::"
RUNS = "tests/unit/test_described_runs.py::"
SECRET = "tests/contracts/test_secrets.py::"
ANY_RUN = f"{RUNS}test_a_server_that_cannot_be_asked_by_it_needs_no_note"
ANY_SECRET = f"{SECRET}test_two_seals_of_one_secret_differ"
ANY_DESCRIPTION = f"{DESCRIBED}test_nested_objects_are_merged_and_all_else_is_replaced"
RESUMED = f"{DESCRIBED}test_a_run_that_is_resumed_goes_on_by_its_own_version_and_a_new_one_begins_by_the_new"


def _mutant(name: str, breaks: str, file: str, old: str, new: str, *tests: str, still: str) -> Mutant:
    return Mutant(name, breaks, file, old, new, tests, still=still)


SPOKEN = [
    _mutant(
        "a resumed run takes the newest description",
        "versions",
        "slotkeeper/jobs/statements.py",
        "case((_RESUMED, jobs.c.described_by), else_=",
        "case((jobs.c.seq < 0, jobs.c.described_by), else_=",
        RESUMED,
        still=ANY_DESCRIPTION,
    ),
    _mutant(
        "a new run keeps the description of the last",
        "versions",
        "slotkeeper/jobs/statements.py",
        '(jobs.c.server == bindparam("p_server")) & jobs.c.remote_id.is_not(None)',
        'jobs.c.server == bindparam("p_server")',
        f"{DESCRIBED}test_a_run_that_was_never_sent_begins_by_the_new_description",
        still=ANY_DESCRIPTION,
    ),
    _mutant(
        "a description is removed under a run",
        "versions",
        "slotkeeper/registry/server_descriptions.py",
        "        idle -= set(connection.execute(_of_runs(sorted(idle))).scalars()) if idle else set()\n",
        "",
        f"{DESCRIBED}test_a_version_that_a_run_names_stays",
        still=ANY_DESCRIPTION,
    ),
    _mutant(
        "a description is removed as soon as nothing names it",
        "versions",
        "slotkeeper/registry/server_descriptions.py",
        "now_ms - since >= KEPT_MS]",
        "now_ms >= since]",
        f"{DESCRIBED}test_a_version_that_nothing_names_is_removed_after_a_while",
        still=ANY_DESCRIPTION,
    ),
    _mutant(
        "a description may name any model's secret",
        "secrets",
        "app/describing.py",
        "return lambda name: name in secrets and secrets[name].is_for(model)",
        "return lambda name: name in secrets",
        f"{SECRET}test_only_the_models_that_a_secret_is_for_may_name_it",
        still=ANY_SECRET,
    ),
    _mutant(
        "a request has any model's secret",
        "secrets",
        "tasks/security/vault.py",
        "if found is not None and found.is_for(model) else None",
        "if found is not None else None",
        f"{SECRET}test_only_the_models_that_a_secret_is_for_may_name_it",
        still=ANY_SECRET,
    ),
    _mutant(
        "a secret is removed under a description",
        "secrets",
        "app/api/secrets.py",
        "    if models:\n",
        "    if False:\n",
        f"{SECRET}test_a_secret_that_is_named_stays",
        f"{SECRET}test_a_secret_that_a_registration_names_stays_too",
        still=ANY_SECRET,
    ),
    _mutant(
        "one secret can be put in another's place",
        "secrets",
        "tasks/security/vault.py",
        "decrypt(box[:_NONCE], box[_NONCE:], name.encode())",
        'decrypt(box[:_NONCE], box[_NONCE:], b"KEY")',
        f"{SECRET}test_one_secret_cannot_be_put_in_anothers_place",
        still=ANY_SECRET,
    ),
    _mutant(
        "what a poll repeats of the submit's secret is told",
        "secrets",
        "tasks/servers/adapter.py",
        "        return (*filter(None, map(self._secret, sorted(self.description.secrets))), *known)\n",
        "        return known\n",
        f"{SECRET}test_a_poll_that_repeats_what_the_submit_sent_tells_it_to_nobody",
        f"{SECRET}test_what_a_server_repeats_of_a_secret_is_told_to_nobody",
        still=ANY_SECRET,
    ),
    _mutant(
        "a secret inside of JSON is told",
        "secrets",
        "tasks/servers/responses.py",
        "for form in (secret, orjson.dumps(secret).decode()[1:-1])}",
        "for form in (secret,)}",
        f"{SECRET}test_what_a_server_repeats_of_a_secret_is_told_to_nobody",
        still=ANY_SECRET,
    ),
    _mutant(
        "an id that we give is noted after the request",
        "runs",
        "tasks/worker/server_call.py",
        "if live.description.is_found_by_given_id and not",
        "if False and not",
        f"{RUNS}test_an_id_that_we_give_is_in_the_record_before_the_request_is_sent",
        f"{RUNS}test_a_request_without_an_answer_is_asked_for_by_our_id",
        still=ANY_RUN,
    ),
    _mutant(
        "a run that its server knew is sent to it again",
        "runs",
        "tasks/worker/server_call.py",
        "            self._unheard = False\n",
        "            pass\n",
        f"{RUNS}test_a_run_that_the_server_knew_and_forgot_is_not_sent_again",
        still=ANY_RUN,
    ),
    _mutant(
        "a run is sent again to a server that it may have brought down",
        "runs",
        "tasks/worker/server_call.py",
        "            self._may_send_again = False\n        elif",
        "            pass\n        elif",
        f"{RUNS}test_a_request_whose_server_could_not_be_asked_meanwhile_is_not_sent_again",
        still=ANY_RUN,
    ),
    _mutant(
        "a server that pushes is polled",
        "runs",
        "tasks/worker/server_call.py",
        'if live.description.mode == "callback":',
        "if False:",
        f"{RUNS}test_a_server_that_pushes_is_never_polled",
        f"{RUNS}test_a_resumed_run_waits_for_its_push_and_is_not_sent_again",
        still=ANY_RUN,
    ),
    _mutant(
        "a busy server is taken for a silent one",
        "runs",
        "tasks/worker/server_call.py",
        "if health.kind not in (HealthKind.UP, HealthKind.UNKNOWN) or _knows(health, self.question):",
        "if _knows(health, self.question):",
        f"{RUNS}test_a_push_is_waited_for_while_the_server_is_busy",
        still=ANY_RUN,
    ),
    _mutant(
        "the slot of a result that is read once goes on before that is stored",
        "JOB-1",
        "routing/dispatch/decision.py",
        "frees_slot_first=keeps_result and not",
        "frees_slot_first=not",
        f"{RUNS}test_a_result_that_its_server_has_no_more_is_stored_before_the_slot_goes_on",
        still=ANY_RUN,
    ),
    _mutant(
        "a result that is read once has two readers",
        "JOB-1",
        "tasks/server_push.py",
        'if not server.description.keeps_results and server.description.mode != "callback":',
        "if False:",
        f"{DESCRIBED}test_a_push_about_a_result_that_is_read_once_is_left_to_the_worker",
        still=f"{CALLBACK}test_a_push_ends_the_run_and_hands_the_slot_on",
    ),
]
