"""Guards of the API: bodies, connections, threads."""

from tests.faults.mutant import Mutant

ASKED = "tests/contracts/test_api_submit.py::"
READING = "tests/unit/app/test_reading.py::"
ALIVE = f"{ASKED}test_a_submitted_job_is_in_the_record_when_it_is_answered"

DOOR = [
    Mutant(
        "a body that broke off passes for a whole one",
        "all or none",
        "app/api/reading.py",
        "if announced is not None and len(body) != announced:",
        "if False:",
        (f"{ASKED}test_a_body_that_broke_off_is_refused_whole",),
        still=ALIVE,
    ),
    Mutant(
        "lines are taken without knowing their end",
        "all or none",
        "app/api/reading.py",
        "if request.content_length is None and not request.environ.get(WHOLE):",
        "if False:",
        (f"{ASKED}test_lines_of_which_nobody_knows_the_end_are_refused",),
        still=ALIVE,
    ),
    Mutant(
        "each unknown field costs a sentence",
        "linear cost",
        "app/schemas.py",
        "if not isinstance(given, dict) or len(given) <= len(known) + _MOST_UNKNOWN:",
        "if True:",
        ("tests/unit/app/test_schemas.py::test_of_very_many_unknown_fields_only_a_few_are_looked_at",),
        still=ALIVE,
    ),
]
