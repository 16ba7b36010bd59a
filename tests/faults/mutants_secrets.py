"""Guards of keys, of what is private, and of what comes from outside."""

from tests.faults.mutant import CALLBACK, Mutant

HOME = "tests/unit/test_private_home.py::"
KEYRING = "tests/unit/test_keyring.py::"
LOGS = "tests/unit/test_logs.py::"
MISCONFIGURED = "tests/contracts/test_misconfigured_models.py::"
TERMINAL = "tests/unit/cli/test_terminal.py::"
WEBHOOK_SECRETS = "tests/contracts/test_webhook_secrets.py::"

SECRETS = [
    # -- keys ------------------------------------------------------------------------------------------------
    Mutant(
        "a callback token is made with the key of webhooks",
        "keys",
        "tasks/keyring.py",
        "    info = orjson.dumps([purpose, *context])\n",
        '    info = b""\n',
        (
            f"{KEYRING}test_no_two_purposes_tenants_or_rotations_share_a_key",
            f"{KEYRING}test_who_can_verify_webhooks_can_make_no_token",
        ),
        still=f"{CALLBACK}test_a_push_ends_the_run_and_hands_the_slot_on",
    ),
    Mutant(
        "all tenants share a webhook secret",
        "keys",
        "tasks/keyring.py",
        "derive(secret, Purpose.WEBHOOK, tenant, str(number))",
        "derive(secret, Purpose.WEBHOOK, str(number))",
        (f"{WEBHOOK_SECRETS}test_a_webhook_is_verified_by_its_tenants_secret_and_by_no_other",),
        still=f"{WEBHOOK_SECRETS}test_a_second_rotation_ends_the_secret_before_the_last_at_once",
    ),
    Mutant(
        "a rotated secret is signed with for ever",
        "keys",
        "jobs/rotations.py",
        "overlaps = self.number > 0 and now < self.former_until_ms",
        "overlaps = self.number > 0",
        (f"{KEYRING}test_a_rotated_secret_overlaps_with_the_one_before_for_a_day_and_no_longer",),
        still=f"{WEBHOOK_SECRETS}test_a_second_rotation_ends_the_secret_before_the_last_at_once",
    ),
    Mutant(
        "a tenant inherits the webhook secret of one that was removed",
        "keys",
        "jobs/tenants.py",
        "            raise_number(tx, name, now=0)  # Another tenant of this name shall not have its secret.\n",
        "",
        (f"{WEBHOOK_SECRETS}test_a_tenant_of_the_same_name_does_not_inherit_the_secret",),
        still=f"{WEBHOOK_SECRETS}test_a_rotation_concerns_one_tenant",
    ),
    Mutant(
        "another secret goes unnoticed",
        "keys",
        "tasks/startup.py",
        "    return known == present.encode()\n",
        "    return True\n",
        (f"{WEBHOOK_SECRETS}test_a_process_with_another_secret_says_so_at_its_start",),
        still=f"{WEBHOOK_SECRETS}test_a_rotation_concerns_one_tenant",
    ),
    # -- what servers and administrators send ---------------------------------------------------------------
    Mutant(
        "a result is kept however deep it is",
        "results",
        "tasks/servers/rules.py",
        "return TOO_DEEP if is_too_deep(value) else Outcome(Kind.DONE, result=value)",
        "return Outcome(Kind.DONE, result=value)",
        (
            "tests/unit/servers/test_rules.py::test_a_result_has_two_hundred_levels_and_no_more",
            f"{CALLBACK}test_a_result_that_is_too_deep_is_an_error_of_the_server",
        ),
    ),
    Mutant(
        "a template is stored that no worker can compile",
        "results",
        "app/schemas.py",
        '        for_model("async", template, id_field)\n',
        "",
        (f"{MISCONFIGURED}test_a_template_that_cannot_be_compiled_is_refused_with_its_place",),
        still=f"{MISCONFIGURED}test_its_job_costs_a_retry_and_says_why",
    ),
    Mutant(
        "one model's configuration ends the check of all servers",
        "results",
        "tasks/maintenance.py",
        "    except Misconfigured as error:",
        "    except ZeroDivisionError as error:",
        (f"{MISCONFIGURED}test_maintenance_of_all_others_goes_on",),
        still=f"{MISCONFIGURED}test_its_job_costs_a_retry_and_says_why",
    ),
    Mutant(
        "a job pays with a crash for its model's configuration",
        "results",
        "tasks/inference.py",
        "    except Misconfigured as error:",
        "    except ZeroDivisionError as error:",
        (f"{MISCONFIGURED}test_its_job_costs_a_retry_and_says_why",),
        still=f"{MISCONFIGURED}test_maintenance_of_all_others_goes_on",
    ),
    # -- logs ------------------------------------------------------------------------------------------------
    Mutant(
        "what an error says is logged whatever it is",
        "logs",
        "jobs/logs.py",
        "if isinstance(error, _SPEAK_OF_CODE) or _is_verbose() else",
        "if error else",
        (f"{LOGS}test_an_error_is_one_line_of_kind_and_places_without_its_text_or_locals",),
        still=f"{LOGS}test_configured_twice_it_speaks_once",
    ),
    Mutant(
        "arguments and results of tasks are logged",
        "logs",
        "jobs/logs.py",
        "    if isinstance(record.args, Mapping):",
        "    if False:",
        (f"{LOGS}test_what_celery_tells_of_a_task_has_neither_arguments_nor_results",),
        still=f"{LOGS}test_configured_twice_it_speaks_once",
    ),
    Mutant(
        "a line is as long as it likes",
        "logs",
        "jobs/logs.py",
        "return text if len(text) <= most else",
        "return text if text else",
        (f"{LOGS}test_what_is_long_or_unprintable_is_cut_and_shown_harmlessly",),
        still=f"{LOGS}test_configured_twice_it_speaks_once",
    ),
    # -- the state folder ------------------------------------------------------------------------------------
    Mutant(
        "SQLite makes its files by the umask",
        "home",
        "jobs/engines.py",
        "        private_file(file)\n",
        "",
        (f"{HOME}test_a_record_and_what_sqlite_makes_beside_it_are_the_owners_only",),
        still=f"{HOME}test_all_who_ask_first_get_the_same_text",
    ),
    Mutant(
        "a folder that is too open stays so",
        "home",
        "jobs/home.py",
        "        path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)\n    elif",
        "        pass\n    elif",
        (f"{HOME}test_whoever_comes_first_makes_it_private", f"{HOME}test_what_an_older_release_left_open_is_closed"),
        still=f"{HOME}test_all_who_ask_first_get_the_same_text",
    ),
    Mutant(
        "a shared folder is closed to those who share it",
        "home",
        "jobs/home.py",
        "    if found.st_mode & stat.S_ISVTX:\n        return False\n",
        "",
        (f"{HOME}test_a_sticky_folder_is_never_ours",),
        still=f"{HOME}test_all_who_ask_first_get_the_same_text",
    ),
    Mutant(
        "the embedded Valkey serves everybody on the machine",
        "home",
        "app/up/valkey.py",
        '        "requirepass": password,\n',
        "",
        (f"{HOME}test_the_embedded_valkey_serves_who_has_the_password_and_nobody_else",),
        still=f"{HOME}test_all_who_ask_first_get_the_same_text",
    ),
    # -- the terminal ----------------------------------------------------------------------------------------
    Mutant(
        "what is said is said as it came",
        "terminal",
        "app/terminal.py",
        "    click.echo(plain(text), err=err)",
        "    click.echo(text, err=err)",
        (f"{TERMINAL}test_what_a_command_prints_is_text_and_nothing_else",),
        still=f"{TERMINAL}test_json_text_is_the_same_value",
    ),
    Mutant(
        "what stands in a table is markup",
        "terminal",
        "app/terminal.py",
        "return Text(plain(text), style, justify",
        "return Text.from_markup(text, style=style, justify",
        (f"{TERMINAL}test_a_text_is_shown_with_visible_escapes",),
        still=f"{TERMINAL}test_json_text_is_the_same_value",
    ),
    Mutant(
        "a refusal is said as it came",
        "terminal",
        "app/terminal.py",
        "error.message = plain(str(error.message))",
        "error.message = str(error.message)",
        (f"{TERMINAL}test_a_refusal_is_text_too",),
        still=f"{TERMINAL}test_json_text_is_the_same_value",
    ),
    Mutant(
        "JSON holds controls of eight bits",
        "terminal",
        "app/terminal.py",
        'ch if _is_plain(ch) or ch == "\\n" else _json_escape(ch)',
        "ch",
        (f"{TERMINAL}test_json_text_is_the_same_value",),
        still=f"{TERMINAL}test_a_field_stays_in_its_line",
    ),
]
