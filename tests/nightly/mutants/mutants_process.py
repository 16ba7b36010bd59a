"""Processes, their files, logs and terminals."""

from tests.nightly.mutants.operators import Mutant, drop, never, swap, swap_entry

MUTANTS = [
    Mutant(
        "a full log stops the process",
        "slotkeeper.logs:_Handler.enqueue",
        swap("self._lines.put_nowait(record)", "self._lines.put(record)"),
        kills=["test_a_process_works_and_exits_although_no_reader_consumes_its_log"],
        breaks="logs",
        still="test_an_event_is_one_line_with_its_facts",
    ),
    Mutant(
        "a living process is taken for dead",
        "slotkeeper.process_locks:ProcessLocks._find_dead",
        drop("fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)"),
        kills=[
            "test_a_process_that_was_killed_is_proved_to_have_ended_and_one_that_is_stopped_is_not",
            "test_a_process_does_not_take_itself_for_dead",
        ],
        breaks="LEASE-4",
        still="test_a_process_that_releases_its_lock_leaves_no_file",
    ),
    Mutant(
        "a lock file of another kernel is believed",
        "slotkeeper.process_locks:_proof",
        swap(
            'f"{read_boot_id()} {found.st_dev} {found.st_ino} {name}\\n"',
            'f"{len(read_boot_id()) * 0} {found.st_dev} {found.st_ino} {name}\\n"',
        ),
        kills=["test_a_file_of_another_boot_does_not_prove_that_its_process_has_ended"],
        breaks="LEASE-4",
        still="test_a_process_that_releases_its_lock_leaves_no_file",
    ),
    Mutant(
        "a file under another name proves a process dead",
        "slotkeeper.process_locks:ProcessLocks._find_dead",
        swap("path == self._path(name)", "True"),
        kills=["test_a_renamed_file_does_not_prove_the_end_of_another_process"],
        breaks="LEASE-4",
        still="test_a_process_that_releases_its_lock_leaves_no_file",
    ),
    Mutant(
        "the text of any error is logged",
        "slotkeeper.logs:summarize_error",
        swap("isinstance(error, _SPEAK_OF_CODE) or _is_verbose()", "error"),
        kills=["test_an_error_is_one_line_with_its_type_and_places_and_without_its_text_or_locals"],
        breaks="secrets",
        still="test_an_event_is_logged_once_when_logs_are_configured_twice",
    ),
    Mutant(
        "arguments and results of tasks are logged",
        "slotkeeper.logs:_message_without_values",
        never("isinstance(record.args, Mapping)"),
        kills=["test_a_celery_task_is_logged_without_arguments_and_results"],
        breaks="secrets",
        still="test_an_event_is_logged_once_when_logs_are_configured_twice",
    ),
    Mutant(
        "a folder of another user is trusted",
        "slotkeeper.state_folder:make_private_folder",
        never("found.st_uid not in (os.geteuid(), _ROOT)"),
        kills=["test_a_folder_of_another_user_is_refused_although_it_is_private"],
        breaks="private files",
        still="test_a_sticky_folder_is_refused_as_the_state_folder",
    ),
    Mutant(
        "the embedded Valkey needs no password",
        "app.up.valkey_server:valkey_role",
        swap_entry('"requirepass": password', ""),
        kills=["test_the_embedded_valkey_serves_only_clients_with_the_password"],
        breaks="authentication",
        still="test_concurrent_first_readers_get_the_same_text",
    ),
    Mutant(
        "control characters are printed as they came",
        "app.terminal:echo",
        swap("escape_controls(text)", "text"),
        kills=["test_the_output_of_a_command_contains_no_control_characters"],
        breaks="terminal injection",
        still="test_json_text_is_the_same_value",
    ),
]
