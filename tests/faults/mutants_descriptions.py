"""Guards of how servers are spoken to, as data and by wire, each taken out once."""

from tests.faults.mutant import Mutant

CLIENT = "tests/unit/servers/test_client.py::"
TEMPLATES = "tests/unit/servers/test_templates.py::"

CONVERSATIONS = "tests/unit/servers/test_presets.py::"
PROBE = "tests/unit/servers/test_probe.py::"
PRESETS = "tests/contracts/test_api_presets.py::"

DESCRIPTIONS = [
    Mutant(
        "what a server answers while it starts fails its jobs",
        "a server that is not ready costs a job nothing",
        "tasks/servers/adapter.py",
        "if health.kind not in (HealthKind.BUSY, HealthKind.DOWN):",
        "if True:",
        (f"{CONVERSATIONS}test_a_server_that_is_not_ready_fails_no_job",),
        still=f"{CONVERSATIONS}test_a_preset_is_a_description_that_can_be_compiled",
    ),
    Mutant(
        "a probe tells secrets",
        "a secret is shown to nobody",
        "tasks/servers/probe.py",
        "return ProbedExchange(step, request, reply.status, redact(reply.head, secrets or ()), took_ms, **more)",
        "return ProbedExchange(step, request, reply.status, redact(reply.head), took_ms, **more)",
        (f"{PROBE}test_a_secret_is_sent_and_never_told",),
        still=f"{PROBE}test_an_exchange_that_breaks_off_is_told_too",
    ),
    Mutant(
        "a probe asks any address",
        "requests are sent to inference servers alone",
        "app/api/preset_views.py",
        'validate_endpoint(body.url, "url")',
        "pass",
        (f"{PRESETS}test_what_cannot_be_probed_is_refused_by_its_field",),
        still=f"{PRESETS}test_nobody_there_is_an_answer",
    ),
    Mutant(
        "a path grows into the host's name",
        "a description reaches nothing but its server",
        "tasks/servers/templates.py",
        'if not path.startswith("/"):',
        "if False:",
        (f"{TEMPLATES}test_what_follows_an_endpoint_without_a_path_never_becomes_part_of_the_host",),
        still=f"{TEMPLATES}test_a_path_can_go_on_from_the_registered_endpoint",
    ),
    Mutant(
        "a connection on which the server has failed is used again",
        "an answer is never lost for a connection that was about to close",
        "tasks/servers/http_connection.py",
        "_CLOSE_AFTER_STATUS = 500",
        "_CLOSE_AFTER_STATUS = 0",
        (f"{CLIENT}test_a_connection_on_which_the_server_has_failed_is_not_reused",),
        still=f"{CLIENT}test_connections_are_kept",
    ),
    Mutant(
        "a harmless value makes a path of any length",
        "memory",
        "tasks/servers/templates.py",
        "if suspect or len(path) > MAX_LENGTH else path",
        "if suspect else path",
        (f"{TEMPLATES}test_a_value_that_makes_a_path_too_long_is_a_wrong_payload",),
        still=f"{TEMPLATES}test_what_was_put_in_is_not_looked_at_again",
    ),
    Mutant(
        "a value makes a header of any length",
        "memory",
        "tasks/servers/templates.py",
        "if len(text) > _LONGEST_HEADER:",
        "if False:",
        (f"{TEMPLATES}test_a_value_that_is_too_long_for_a_header_is_a_wrong_payload",),
        still=f"{TEMPLATES}test_what_was_put_in_is_not_looked_at_again",
    ),
    Mutant(
        "a preset whose try has found nothing is proposed",
        "operators",
        "app/api/preset_views.py",
        """if told["outcome"] is None or told["outcome"]["code"] != "misconfigured":""",
        "if told:",
        (f"{PRESETS}test_a_preset_whose_try_finds_nothing_gives_way_to_the_next",),
        still=f"{PRESETS}test_nobody_there_is_an_answer",
    ),
]
