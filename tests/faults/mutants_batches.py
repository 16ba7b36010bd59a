"""Guards of batches and of the page's forms: whose they are, what is read for them, and what nobody said."""

from tests.faults.mutant import Mutant

BATCH_TESTS = "tests/contracts/test_api_batches.py::"

BATCHES = [
    Mutant(
        "everybody sees and cancels every batch",
        "batches",
        "app/api/batches.py",
        "return None if mine.admin else mine.name",
        "return None",
        (
            f"{BATCH_TESTS}test_a_tenant_sees_its_own_batches_and_no_others",
            "tests/contracts/test_page.py::test_a_tenant_sees_and_cancels_its_own_batches_and_no_others",
        ),
        still=f"{BATCH_TESTS}test_a_batch_is_canceled_as_a_whole",
    ),
    Mutant(
        "a batch of the same name shows another tenant's jobs",
        "batches",
        "routing/queries/batches.py",
        "facts = _FACTS if tenant is None else _FACTS.where(jobs.c.tenant == tenant)",
        "facts = _FACTS",
        (f"{BATCH_TESTS}test_two_tenants_that_name_the_same_batch_share_nothing",),
        still=f"{BATCH_TESTS}test_batches_are_listed_page_by_page_the_newest_first",
    ),
    Mutant(
        "who cancels a batch cancels another tenant's jobs of the same name",
        "batches",
        "routing/queries/batches.py",
        "active = active.where(jobs.c.tenant == tenant)",
        "pass",
        (f"{BATCH_TESTS}test_two_tenants_that_name_the_same_batch_share_nothing",),
        still=f"{BATCH_TESTS}test_a_batch_is_canceled_as_a_whole",
    ),
    Mutant(
        "an ambiguous short id names other tenants' jobs",
        "jobs",
        "slotkeeper/jobs/short_ids.py",
        "if tenant is not None:",
        "if not conditions:",
        ("tests/contracts/test_short_ids.py::test_an_ambiguous_id_names_only_the_tenants_own_jobs",),
        still="tests/contracts/test_short_ids.py::test_every_path_with_a_job_takes_its_short_id",
    ),
    Mutant(
        "a rotated key is valid for ever",
        "tenants",
        "slotkeeper/registry/tenants.py",
        "(tenants.c.former_hash == hashed) & (tenants.c.former_until_ms > clock.now_ms())",
        "tenants.c.former_hash == hashed",
        ("tests/contracts/test_tenants.py::test_both_keys_are_valid_until_the_overlap_is_over",),
        still="tests/contracts/test_tenants.py::test_limits_change_and_the_key_stays",
    ),
    Mutant(
        "a tenant is removed without a question",
        "tenants",
        "app/cli/local_commands.py",
        "    if not yes:",
        "    if yes and not yes:",
        ("tests/contracts/test_tenants.py::test_a_removal_says_what_the_tenant_has_and_asks",),
        still="tests/contracts/test_tenants.py::test_commands_change_and_rotate",
    ),
    Mutant(
        "a batch's jobs are looked for among all jobs",
        "batches",
        "routing/queries/job_list.py",
        "query.where(given[0][0].is_not(None), key_range(",
        "query.where(key_range(",
        (f"{BATCH_TESTS}test_looks_at_batches_read_by_their_indexes",),
        still=f"{BATCH_TESTS}test_a_batch_is_shown_with_how_far_it_has_come",
    ),
    Mutant(
        "a server is removed under its runs although nobody said so",
        "page",
        "app/page/removal.py",
        'force=_says("force")',
        "force=True",
        ("tests/contracts/test_page_removal.py::test_a_server_with_a_run_is_drained_which_can_be_called_off",),
        still="tests/contracts/test_page_removal.py::test_a_server_on_which_nothing_runs_is_removed_at_once",
    ),
]
