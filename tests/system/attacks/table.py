"""All attack surfaces: possible attempts on each, conditions that must hold during and after them, and their tests.

Before each attempt, honest clients are served and all resources are free.  A row's tests are names of pytest tests,
or attacks of tests/system/attacks, which check before, during and after.
"""

from dataclasses import dataclass

API = "tests/app/api/"
CONNECTION = "tests/app/server/test_http_protocol.py::"
STREAMS = "tests/app/server/test_event_stream.py::"
CAPACITY = "tests/app/server/test_connection_limits.py::"
MALFORMED = "tests/system/faults/test_malformed.py::"
REVOKES = "tests/system/faults/test_revokes.py::"
CELERY = "tests/system/lifecycle/test_celery_identity.py::"
ENDPOINTS = "tests/app/api/test_endpoint_addresses.py::"
ADDRESSES = "tests/tasks/security/test_url_guard.py::"
OUTBOUND = "tests/tasks/webhooks/test_sender.py::"
DELIVERIES = "tests/tasks/webhooks/test_delivery_loop.py::"
SERVER = "tests/tasks/servers/test_adapter.py::"
ANSWERS = "tests/tasks/servers/test_responses.py::"
TERMINAL = "tests/app/cli/test_terminal.py::"
GUARD = "tests/slotkeeper/serve/test_host_guard.py::"
BROWSER = "tests/system/browser/test_foreign_pages.py::"
FLOWER = "tests/system/lifecycle/test_flower.py::"
HOME = "tests/system/lifecycle/test_state_folder.py::"
ATTACK = "attack: "


@dataclass(frozen=True)
class Row:
    """One possible attempt on an attack surface."""

    surface: str
    tried: str
    during: str
    after: str
    tests: tuple[str, ...]


_SERVED = "live, operators and other tenants are answered within a second or two"
_NOTHING = "nothing of it is accepted"

TABLE = [
    # -- HTTP framing --------------------------------------------------------------------------------------------------
    Row(
        "HTTP framing",
        "a request that can be read in two ways (lengths, chunks, folds, bare line feeds, versions, tunnels)",
        "it is refused with 400, whether it comes at once or byte by byte",
        "nothing behind it is read",
        (
            f"{CONNECTION}test_an_ambiguous_request_is_refused_and_no_later_request_is_parsed",
            f"{CONNECTION}test_an_ambiguous_request_is_refused_also_if_its_bytes_arrive_one_by_one",
        ),
    ),
    Row(
        "HTTP framing",
        "thousands of requests in one packet",
        "few of them are read before their turn",
        "all are answered, in their order",
        (
            f"{CONNECTION}test_only_a_few_pipelined_requests_are_parsed_ahead",
            f"{CONNECTION}test_a_connection_is_closed_after_the_first_of_many_refused_requests",
        ),
    ),
    Row(
        "HTTP framing",
        "streams of HTTP/2 without an end; connections that are silent, or nearly so",
        _SERVED,
        "their places are free again",
        (
            f"{ATTACK}unfinished HTTP/2 streams",
            f"{ATTACK}connections that send nothing",
            f"{ATTACK}heads without an end",
            f"{ATTACK}answers that are not read",
            f"{ATTACK}connections that send nothing, for a minute",
        ),
    ),
    Row(
        "HTTP framing",
        "clients that ask and leave",
        "their requests are not begun",
        "no thread sleeps for them",
        (
            f"{CONNECTION}test_a_request_whose_client_disconnects_while_it_waits_for_a_thread_is_not_handled",
            f"{STREAMS}test_a_request_above_the_limit_does_not_wait_and_a_closed_one_frees_its_place",
        ),
    ),
    Row(
        "HTTP framing",
        "a line end in what the application puts into a header",
        "it begins no other header",
        "the connection goes on",
        (f"{CONNECTION}test_a_line_break_in_a_response_header_starts_no_new_header",),
    ),
    # -- bodies --------------------------------------------------------------------------------------------------------
    Row(
        "bodies",
        "bodies that hardly move",
        _SERVED,
        "they are closed with 408",
        (
            f"{ATTACK}bodies that hardly move",
            f"{ATTACK}chunks that hardly move",
            f"{ATTACK}bodies of strangers",
            f"{ATTACK}bodies that hardly move, for a minute",
            f"{ATTACK}slow batches, for a minute",
        ),
    ),
    Row(
        "bodies",
        "bodies that break off, by each way of breaking off, in both framings",
        _SERVED,
        _NOTHING,
        (f"{ATTACK}bodies that break off", f"{API}test_submit.py::test_an_incomplete_request_body_is_refused"),
    ),
    Row(
        "bodies",
        "bodies that cost: twice the same key, unknown fields, depth, digits, millions of values",
        _SERVED,
        _NOTHING,
        (
            f"{ATTACK}bodies that cost",
            f"{ATTACK}bodies that cost, for a minute",
            f"{ATTACK}batches that cost, for a minute",
            f"{API}test_submit.py::test_an_overlong_batch_is_refused_at_its_first_invalid_job_without_parsing_the_rest",
            f"{API}test_submit.py::test_deep_nesting_beside_a_long_integer_is_a_client_error",
        ),
    ),
    Row(
        "bodies",
        "more bytes than the limit",
        "whoever holds most gives way",
        "its memory is free again",
        (
            f"{CAPACITY}test_an_owner_holds_a_fourth_of_all_bytes",
            f"{CAPACITY}test_a_full_buffer_closes_the_connection_that_holds_most_bytes",
        ),
    ),
    # -- keys ----------------------------------------------------------------------------------------------------------
    Row(
        "keys",
        "no key, a wrong one, one that was removed, made-up ones by the hundred",
        "401; good keys are known at once",
        "nothing was done",
        (
            f"{ATTACK}keys are tried out",
            f"{API}test_access.py::test_a_request_without_a_valid_key_is_refused",
            f"{API}test_access.py::test_a_removed_key_stops_working",
            f"{CONNECTION}test_unknown_keys_do_not_delay_valid_keys_and_share_a_few_lookups",
        ),
    ),
    Row(
        "keys",
        "the network, or a proxy, where no keys are asked for",
        "refused with the remedy",
        "nothing was done",
        (
            f"{API}test_access.py::test_the_network_is_not_served_without_keys",
            f"{API}test_hostile_requests.py::test_without_keys_what_a_proxy_passes_on_is_refused_with_the_remedy",
        ),
    ),
    Row(
        "keys",
        "the key of one purpose for another",
        "it fits nowhere else",
        "a rotation ends it",
        (
            "tests/tasks/security/test_keyring.py::test_no_two_purposes_tenants_or_rotations_share_a_key",
            "tests/tasks/security/test_keyring.py::test_no_valid_token_can_be_made_with_a_webhook_secret",
        ),
    ),
    # -- tenants -------------------------------------------------------------------------------------------------------
    Row(
        "tenants",
        "another tenant's job, or administration",
        "404 and 403",
        "it is as it was",
        (
            f"{API}test_access.py::test_a_tenant_sees_and_cancels_only_its_own_jobs",
            f"{API}test_access.py::test_a_request_for_another_tenants_job_gets_the_same_response_as_for_an_unknown_job",
            f"{API}test_access.py::test_a_key_opens_only_what_its_scopes_say",
        ),
    ),
    Row(
        "tenants",
        "all threads, all places for waiting, all turns",
        "half of them stay for the others",
        "turns go round",
        (
            f"{ATTACK}one tenant asks without pause",
            f"{ATTACK}anybody asks for the health",
            f"{CONNECTION}test_with_keys_required_one_owner_gets_only_a_share_of_threads_and_waiting_places",
            f"{STREAMS}test_waiting_ends_with_the_job_and_holds_no_thread",
            "tests/app/server/test_fair_pool.py::test_no_owner_holds_more_than_its_share",
        ),
    ),
    # -- streams -------------------------------------------------------------------------------------------------------
    Row(
        "streams",
        "thousands of streams",
        "beyond a tenant's bound, and that of all, they are refused with 429; none holds a thread",
        "who leaves has freed its place",
        (f"{STREAMS}test_the_number_of_streams_is_limited_per_tenant_and_in_total_and_a_closed_one_is_freed",),
    ),
    Row(
        "streams",
        "a client that does not read what it follows",
        "it is closed when its buffer is full, and others get theirs",
        "its buffer is free, and it may come again where it was",
        (f"{STREAMS}test_a_slow_reader_is_disconnected_and_other_readers_get_all_events",),
    ),
    Row(
        "streams",
        "another tenant's events, by the stream of all, of a job, or from an id on",
        "its own are all that it is told",
        "another's job looks like none",
        (f"{STREAMS}test_a_tenant_receives_the_events_of_its_own_jobs_and_an_administrator_of_all",),
    ),
    Row(
        "streams",
        "ids that are none, too old, or not given yet",
        "they are refused with 422, or the gap is told",
        "the stream goes on from now",
        (
            f"{STREAMS}test_an_invalid_stream_request_is_refused",
            f"{STREAMS}test_a_stream_reports_a_gap_first_if_requested_events_are_deleted",
            f"{STREAMS}test_a_stream_reports_a_gap_for_an_id_above_the_newest_event",
        ),
    ),
    # -- receivers of webhooks -----------------------------------------------------------------------------------------
    Row(
        "webhooks' receivers",
        "an address inside, in each spelling, by name, by a name that changes, by redirect, by a proxy",
        "no connection is made to it",
        "the client is told, and no more than the host",
        (
            f"{ADDRESSES}test_a_url_with_an_internal_address_is_refused_before_any_dns_lookup",
            f"{ADDRESSES}test_a_name_that_leads_inside_is_refused_before_a_connection",
            f"{ADDRESSES}test_a_name_is_resolved_once_so_that_a_second_response_cannot_rebind_it",
            f"{ADDRESSES}test_a_redirect_inside_is_not_followed",
            f"{ADDRESSES}test_no_spelling_of_any_private_address_is_accepted",
            f"{OUTBOUND}test_no_proxy_of_the_environment_is_used",
        ),
    ),
    Row(
        "webhooks' receivers",
        "receivers that never answer, trickle, or answer without end",
        "others are told in time; maintenance is another process",
        "a bounded part of the answer was read",
        (
            f"{DELIVERIES}test_silent_receivers_do_not_delay_those_that_answer",
            f"{DELIVERIES}test_a_backlog_of_one_receiver_does_not_delay_messages_to_another",
            f"{OUTBOUND}test_a_receiver_that_sends_its_response_slowly_times_out",
            f"{OUTBOUND}test_a_body_without_end_is_not_read",
            "tests/tasks/webhooks/test_delivery_limits.py::test_a_tenant_gets_at_most_half_of_the_deliveries_at_once",
        ),
    ),
    Row(
        "webhooks' receivers",
        "a message that was tampered with, or signed by another tenant's secret",
        "it does not verify",
        "a rotation lets both secrets verify for a day",
        (
            f"{OUTBOUND}test_a_message_that_was_tampered_with_does_not_verify",
            "tests/app/api/test_webhook_secrets.py::test_a_webhook_is_verified_by_its_tenants_secret_and_by_no_other",
        ),
    ),
    # -- servers' answers ----------------------------------------------------------------------------------------------
    Row(
        "servers' answers",
        "garbage, giants, trickles, redirects, answers to other questions",
        "the worker goes on, and reads a bounded part",
        "the job ends as an error of the server, or is asked for again",
        (
            f"{SERVER}test_an_invalid_response_body_costs_a_retry",
            f"{SERVER}test_a_response_that_exceeds_the_size_limit_fails_the_job",
            f"{SERVER}test_a_trickle_is_cut_at_the_deadline",
            f"{SERVER}test_a_redirect_is_not_followed",
            f"{SERVER}test_a_partly_read_response_does_not_affect_the_next_request",
            f"{SERVER}test_a_remote_id_that_would_change_the_path_is_not_requested",
        ),
    ),
    Row(
        "servers' answers",
        "a secret echoed, or controls in an error's text",
        "one bounded line without them is kept",
        "nobody is shown them",
        (
            f"{ANSWERS}test_a_message_is_one_bounded_line_without_controls",
            f"{ANSWERS}test_a_message_repeats_no_secret_not_even_half_of_one",
        ),
    ),
    Row(
        "servers' answers",
        "a description whose templates or patterns cannot be used, or cost",
        "refused where it is given",
        "maintenance of all others goes on",
        (
            "tests/app/api/test_misconfigured_models.py::test_a_template_that_cannot_be_compiled_is_refused_with_its_field",
            "tests/app/api/test_descriptions.py::test_an_invalid_description_is_refused_with_a_json_pointer_and_a_remedy",
            "tests/app/api/test_descriptions.py::test_the_description_of_a_registration_is_validated_in_the_same_way",
            "tests/app/api/test_misconfigured_models.py::test_a_misconfigured_model_does_not_stop_the_maintenance_of_other_models",
            "tests/tasks/servers/test_patterns.py::test_a_pattern_whose_program_is_large_is_refused",
        ),
    ),
    # -- push ----------------------------------------------------------------------------------------------------------
    Row(
        "push",
        "a forged token, an old attempt's, another job's id, a result that is too large or too deep",
        "403, 413, 422, or ignored; a refusal does not tell whether there is such a job",
        "the run goes on, and ends once",
        (
            f"{API}test_push.py::test_a_forged_push_changes_nothing",
            f"{API}test_push.py::test_a_superseded_attempt_cannot_end_the_next",
            f"{API}test_push.py::test_a_push_that_names_another_job_is_ignored",
            f"{API}test_push.py::test_a_push_with_a_wrong_token_gets_the_same_answer_for_known_and_unknown_jobs",
            f"{API}test_push.py::test_a_result_that_is_too_large_is_refused",
            f"{API}test_push.py::test_a_result_that_is_nested_too_deep_fails_the_job",
        ),
    ),
    # -- broker messages -----------------------------------------------------------------------------------------------
    Row(
        "broker messages",
        "messages and broadcasts that no task could be",
        "honest ones are answered, by the same worker",
        "each was rejected once, told in a line without its content",
        (
            f"{MALFORMED}test_no_message_ends_a_worker_or_is_read_twice",
            f"{MALFORMED}test_no_broadcast_ends_a_worker",
            f"{MALFORMED}test_a_message_with_the_id_of_a_job_changes_nothing_about_it",
        ),
    ),
    Row(
        "broker messages",
        "messages that are gigabytes when they are unpacked",
        "they are unpacked up to a bound",
        "they are rejected",
        (
            "tests/tasks/extensions/test_decompression.py::test_a_message_over_the_size_limit_is_refused_and_never_decompressed_completely",
            "tests/tasks/extensions/test_decompression.py::test_a_decompressor_without_a_bound_is_refused",
        ),
    ),
    Row(
        "broker messages",
        "offers that nobody made; revokes; changes of a worker's queues",
        "an offer is valid while its lease in Redis is; a revoke is a cancel; queues stay",
        "no slot is held for nobody",
        (
            "tests/tasks/test_offer_messages.py::test_an_offer_in_a_message_is_open_although_the_message_names_an_owner",
            "tests/routing/dispatch/test_dispatcher.py::test_a_forged_wake_up_claims_nothing",
            "tests/routing/dispatch/test_dispatcher.py::test_a_forged_wake_up_starts_its_job_nowhere_else",
            f"{REVOKES}test_a_revoked_waiting_job_is_canceled_and_delays_no_other_job",
            "tests/tasks/extensions/test_decompression.py::test_a_workers_queues_are_not_for_the_broker_to_say",
        ),
    ),
    Row(
        "broker messages",
        "where keys are asked for: no token, a key, a forged one, one that has ended or whose key was revoked",
        "tokens of others are accepted",
        "nothing is stored",
        (
            f"{CELERY}test_a_message_without_a_token_fails_before_it_is_stored",
            f"{CELERY}test_a_token_submits_for_its_tenant_and_for_no_other",
            f"{CELERY}test_a_step_after_a_revoked_key_is_refused",
            "tests/tasks/test_identity.py::test_a_token_ends",
        ),
    ),
    # -- browser origins -----------------------------------------------------------------------------------------------
    Row(
        "browser origins",
        "a stranger's page in a real Chromium, and under a name that was bound to this machine",
        "it changes and reads nothing of the API, the reference server and Flower",
        "no job was made",
        (f"{BROWSER}test_a_foreign_page_changes_and_reads_nothing",),
    ),
    Row(
        "browser origins",
        "what such a page may send, request by request",
        "403, 415, 421",
        "nothing was done",
        (
            f"{API}test_access.py::test_another_sites_page_cannot_change_anything",
            f"{API}test_access.py::test_a_content_type_that_an_html_form_can_send_is_refused",
            f"{API}test_access.py::test_a_name_that_was_bound_to_this_machine_is_refused",
            f"{API}test_hostile_requests.py::test_responses_forbid_framing_and_content_sniffing",
            f"{GUARD}test_the_host_guard_accepts_or_refuses_each_request_by_its_headers",
            f"{GUARD}test_the_host_guard_checks_every_request",
        ),
    ),
    Row(
        "browser origins",
        "Flower without its password, by each of its addresses",
        "401, or nothing of ours",
        "nothing was done",
        (f"{FLOWER}test_flower_shows_and_does_nothing_without_its_password",),
    ),
    # -- names ---------------------------------------------------------------------------------------------------------
    Row(
        "names",
        "names with controls, blanks, turned writing, of any length; endpoints that lead to metadata or back to us",
        "422, with the field",
        "nothing is called so",
        (
            f"{API}test_hostile_requests.py::test_a_tenant_name_that_cannot_be_displayed_or_requested_is_refused",
            f"{ENDPOINTS}test_an_endpoint_at_a_metadata_address_is_refused_in_every_notation_of_the_host",
            f"{ENDPOINTS}test_an_endpoint_at_this_api_is_refused_in_every_notation_of_the_host",
            f"{ENDPOINTS}test_the_keys_of_an_endpoint_are_kept_where_the_server_is_called_from_and_nowhere_else",
            f"{API}test_hostile_requests.py::test_a_key_in_an_endpoints_query_is_not_shown",
        ),
    ),
    # -- results -------------------------------------------------------------------------------------------------------
    Row(
        "results",
        "a file in a result that a browser could run, with a name that leads elsewhere; another tenant's file",
        "it is offered for download as bytes, under a harmless name; 404",
        "the page drew pictures alone, and its policy allows nothing more",
        (
            "tests/app/test_result_files.py::test_a_file_that_a_browser_could_execute_is_only_offered_as_a_download",
            "tests/app/test_result_files.py::test_a_tenant_sees_no_file_of_anothers_job",
            "tests/app/test_result_files.py::test_only_a_bounded_part_of_a_large_result_is_searched_for_files",
        ),
    ),
    # -- terminal ------------------------------------------------------------------------------------------------------
    Row(
        "terminal",
        "escapes and markup in results, errors, names, reasons",
        "they are shown as text",
        "the terminal obeyed nothing",
        (
            f"{TERMINAL}test_the_output_of_a_command_contains_no_control_characters",
            f"{TERMINAL}test_json_is_the_same_value_and_holds_no_controls",
            f"{TERMINAL}test_an_error_of_the_api_is_printed_without_control_characters",
            "tests/slotkeeper/test_logs.py::test_long_values_are_cut_and_unprintable_characters_are_escaped",
            "tests/slotkeeper/serve/test_exact.py::test_the_text_of_an_error_is_logged_only_at_level_debug",
        ),
    ),
    # -- this machine --------------------------------------------------------------------------------------------------
    Row(
        "this machine",
        "other users of it: the state folder, the embedded Valkey, passwords on command lines",
        "they read and write nothing",
        "what an older release left open is closed",
        (
            f"{HOME}test_the_first_process_creates_a_private_state_folder",
            f"{HOME}test_a_shared_folder_is_refused_with_a_sentence",
            f"{HOME}test_the_embedded_valkey_serves_only_clients_with_the_password",
        ),
    ),
]

SURFACES = tuple(dict.fromkeys(row.surface for row in TABLE))
