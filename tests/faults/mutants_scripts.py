"""Guards of how scripts are called."""

from tests.faults.mutant import Mutant

_HEADERS = "tests/house/test_lua_headers.py::"

SCRIPTS = [
    Mutant(
        "an answer that nobody heard is the next one's",
        "ORDER-1",
        "scripting/scripts.py",
        "        if self._asked is not None:\n",
        "        if False:\n",
        ("tests/lua/test_scripts.py::test_an_answer_that_nobody_heard_is_not_taken_for_the_next",),
        still="tests/lua/test_scripts.py::test_a_call_in_two_steps_is_answered_also_by_a_redis_that_forgot_the_scripts",
    ),
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
