"""Guards of how scripts are called."""

from tests.faults.mutant import Mutant

_HEADERS = "tests/house/test_lua_headers.py::"

SCRIPTS = [
    Mutant(
        "a process starts whose calls are not what the headers say",
        "LEASE-4",
        "scripting/signatures.py",
        "        if said != meant:\n",
        "        if said is None:\n",
        (f"{_HEADERS}test_a_header_that_says_otherwise_than_python_is_refused_before_anything_is_called",),
        still=f"{_HEADERS}test_an_answer_is_read_by_name_and_type",
    ),
    Mutant(
        "a list runs into the next one",
        "SLOT-2",
        "scripting/signatures.py",
        'count = f"len({name}), " if counted else ""',
        'count = ""',
        (f"{_HEADERS}test_what_is_sent_is_what_the_header_says_in_its_order",),
        still=f"{_HEADERS}test_an_answer_is_read_by_name_and_type",
    ),
]
