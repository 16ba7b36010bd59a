import time

import pytest
from pydantic import ValidationError

from tasks.servers.description import Description
from tasks.servers.patterns import MAX_PROGRAM, MAX_PROGRAMS, TEXT_LIMIT, Pattern

# Of those that are accepted, what took Python's backtracking engine seconds, or the most steps of RE2's.
WORST = [
    r"(?i).*(?:[k-l]{96})b",
    r"(?i).*a{97}b",
    r"(a+)+b",
    r"(.*a){20}",
    "a?" * 30 + "a" * 30,
    r"a*(?:(?:a{10}){10}){9}b",
    r".{0,100}x",
]


@pytest.mark.parametrize(
    "text", ["queue (is )?full", r'"type":\s*"Busy"', "(?i)oom|out of memory", "[0-9]{3,5} ms", "^x$", *WORST]
)
def test_a_pattern_that_ends_soon_is_accepted(text):
    Pattern(text)


@pytest.mark.parametrize(
    "text", [".{0,1000}x", "a{0,300}.{900}b", "(((.{0,10}a){0,10}){0,10}b)", "((a{100}){100}){100}"]
)
def test_a_pattern_whose_program_is_large_is_refused(text):
    with pytest.raises(ValueError, match=r"for long|too large|repetition size"):
        Pattern(text)


@pytest.mark.parametrize("text", ["", "x" * 201, "(", "a{1001}", "[z-a]", r"(a)\1", "(?=a)b", "(?>a+)", "\ud800"])
def test_what_is_no_pattern_or_too_long_is_refused(text):
    with pytest.raises(ValueError, match=r"1 to 200|not a regular|surrogates"):
        Pattern(text)


def test_only_the_beginning_of_a_text_is_searched():
    assert Pattern("x").is_in("a" * (TEXT_LIMIT - 1) + "x")
    assert not Pattern("x").is_in("a" * TEXT_LIMIT + "x")


def _cpu_s(pattern: Pattern, text: str) -> float:
    started = time.thread_time()
    pattern.is_in(text)
    return time.thread_time() - started


@pytest.mark.parametrize("text", WORST)
def test_the_patterns_of_a_step_take_a_tenth_of_a_second_at_most(text):
    pattern = Pattern(text)
    worst_s = max(min(_cpu_s(pattern, many * 4000) for _ in range(3)) for many in ("a", "k", "ab", "ä"))
    assert worst_s / pattern.program * MAX_PROGRAMS < 0.5  # seconds of CPU; measured 0.1


def test_the_patterns_of_a_steps_rules_have_a_bound_together():
    rule = {"if": {"text": "a{900}"}, "then": "busy"}
    of_one = Pattern("a{900}").program
    assert of_one <= MAX_PROGRAM
    fit = MAX_PROGRAMS // of_one
    Description.model_validate({"submit": {"rules": [rule] * fit}})
    for step in ("submit", "health"):
        with pytest.raises(ValidationError, match="for long together"):
            Description.model_validate({step: {"path": "/x", "rules": [rule] * (fit + 1)}})
    events = [{"if": {"text": "a{900}"}, "then": "skip"}] * (fit + 1)
    with pytest.raises(ValidationError, match="for long together"):
        Description.model_validate({"submit": {"stream": {"rules": events}}})
