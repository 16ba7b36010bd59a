"""Guards of how scripts are called."""

from tests.faults.mutant import Mutant

_HEADERS = "tests/house/test_lua_headers.py::"

_FULL = "tests/lua/test_full.py::"
_FULL_ROOM = "tests/faults/test_full_redis.py::"

SCRIPTS = [
    Mutant(
        "a full Redis refuses what frees memory",
        "SLOT-2",
        "slotkeeper/redis/scripts.py",
        'return [] if _REFUSED.search(read_source(name)) else ["allow-oom"]',
        "return []",
        (f"{_FULL}test_a_full_redis_refuses_what_brings_in_new_work_and_nothing_else",),
        still=f"{_FULL}test_a_full_redis_refuses_new_work_also_where_it_loads_no_function",
    ),
    Mutant(
        "a full Redis that does not know a script is asked no further",
        "SLOT-2",
        "slotkeeper/redis/scripts.py",
        "        except OutOfMemoryError:\n            return False\n",
        "        except OutOfMemoryError:\n            return True\n",
        (f"{_FULL}test_a_full_redis_that_loads_no_function_runs_the_scripts_that_free_memory",),
        still=f"{_FULL}test_a_full_redis_takes_the_marks_of_maintenance",
    ),
    Mutant(
        "Celery's messages do not go through a full Redis",
        "SLOT-2",
        "slotkeeper/redis/full.py",
        "            if args[0] not in _GO_ON:\n",
        "            if True:\n",
        (
            f"{_FULL}test_celerys_messages_go_through_a_full_redis",
            f"{_FULL}test_a_full_redis_takes_the_marks_of_maintenance",
        ),
        still=f"{_FULL}test_a_full_redis_that_loads_no_function_runs_the_scripts_that_free_memory",
    ),
    Mutant(
        "a room that Redis cannot hold whole never opens",
        "SLOT-2",
        "routing/maintenance/sweep.py",
        "seen.filling.keys() | full)",
        "seen.filling.keys())",
        (f"{_FULL_ROOM}test_a_room_that_redis_cannot_hold_whole_opens_with_the_jobs_that_it_holds",),
        still=f"{_FULL_ROOM}test_a_room_that_is_rebuilt_at_once_opens_though_redis_cannot_hold_it_whole",
    ),
    Mutant(
        "an answer that nobody heard is the next one's",
        "ORDER-1",
        "slotkeeper/redis/scripts.py",
        "        if self._asked is not None:\n",
        "        if False:\n",
        ("tests/lua/test_scripts.py::test_an_answer_that_nobody_heard_is_not_taken_for_the_next",),
        still="tests/lua/test_scripts.py::test_a_call_in_two_steps_is_answered_also_by_a_redis_that_forgot_the_scripts",
    ),
    Mutant(
        "a process starts whose calls are not what the headers say",
        "LEASE-4",
        "slotkeeper/redis/signatures.py",
        "        if said != meant:\n",
        "        if said is None:\n",
        (f"{_HEADERS}test_a_header_that_says_otherwise_than_python_is_refused_before_anything_is_called",),
        still=f"{_HEADERS}test_an_answer_is_read_by_name_and_type",
    ),
    Mutant(
        "a list runs into the next one",
        "SLOT-2",
        "slotkeeper/redis/signatures.py",
        'count = f"len({name}), " if counted else ""',
        'count = ""',
        (f"{_HEADERS}test_what_is_sent_is_what_the_header_says_in_its_order",),
        still=f"{_HEADERS}test_an_answer_is_read_by_name_and_type",
    ),
]
