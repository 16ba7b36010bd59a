"""Guards of the reference server."""

from tests.faults.mutant import Mutant

GUARD = "tests/protocol/test_guard.py::"
REFUSED = "tests/protocol/test_reference_server.py::"
EXACT = "tests/protocol/test_exact.py::"
LET_IN = f"{GUARD}test_who_is_let_in"
NAMES = f"{GUARD}test_names_of_the_network_can_be_told"

REFERENCE_SERVER = [
    Mutant(
        "any page may send to the reference server",
        "origins",
        "slotkeeper/serve/guard.py",
        'if (origin is not None and origin.partition("://")[2] != host) or site not in ("none", "same-origin"):',
        "if False:",
        (LET_IN,),
        still=NAMES,
    ),
    Mutant(
        "any name is the reference server's",
        "origins",
        "slotkeeper/serve/guard.py",
        "return name in self._names or _is_address(name)",
        "return True",
        (LET_IN, NAMES),
        still="tests/protocol/test_reference_server.py::test_a_port_that_is_taken_is_one_line_with_its_number",
    ),
    Mutant(
        "the reference server takes text",
        "origins",
        "slotkeeper/serve/guard.py",
        'if request.method == "POST" and request.body and kind != _JSON:',
        "if False:",
        (LET_IN,),
        still=NAMES,
    ),
    Mutant(
        "the reference server's guard is not asked",
        "origins",
        "slotkeeper/serve/server.py",
        "lambda request: self._guard.refusal(request) or self._door.handle(request)",
        "lambda request: self._door.handle(request)",
        (f"{GUARD}test_the_guard_stands_before_everything",),
        still=LET_IN,
    ),
    Mutant(
        "a head is read in one of two ways",
        "framing",
        "slotkeeper/serve/http_server.py",
        "if any(len(self.headers.get_all(name, ())) > 1 for name in _ONCE) or self.headers.defects:",
        "if False:",
        (f"{REFUSED}test_a_request_that_cannot_be_read_is_refused_in_json_and_ends_the_connection",),
        still=LET_IN,
    ),
    Mutant(
        "the reference server rounds",
        "numbers",
        "slotkeeper/serve/exact.py",
        "if not _LONG.search(text):",
        "if True:",
        (f"{EXACT}test_whole_numbers_are_the_same_both_ways", f"{EXACT}test_a_function_gets_and_gives_long_numbers"),
        still=f"{EXACT}test_what_has_no_place_in_json_is_unwritable",
    ),
    Mutant(
        "the reference server logs payloads",
        "logs",
        "slotkeeper/serve/logs.py",
        "exc_info=error if in_full else None",
        "exc_info=error",
        (f"{EXACT}test_the_text_of_an_error_is_logged_only_for_who_asks",),
        still=f"{EXACT}test_what_has_no_place_in_json_is_unwritable",
    ),
]
