import time

import pytest
from pydantic import ValidationError

from tasks.servers.description import Description
from tasks.servers.patterns import MAX_PROGRAM, MAX_PROGRAMS, TEXT_LIMIT, Pattern

# Accepted patterns that take Python's backtracking engine seconds, or that take RE2 the most steps.
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
def test_a_pattern_with_a_short_run_time_is_accepted(text):
    Pattern(text)


@pytest.mark.parametrize(
    "text", [".{0,1000}x", "a{0,300}.{900}b", "(((.{0,10}a){0,10}){0,10}b)", "((a{100}){100}){100}"]
)
def test_a_pattern_whose_program_is_large_is_refused(text):
    with pytest.raises(ValueError, match=r"for long|too large|repetition size"):
        Pattern(text)


@pytest.mark.parametrize("text", ["", "x" * 201, "(", "a{1001}", "[z-a]", r"(a)\1", "(?=a)b", "(?>a+)", "\ud800"])
def test_an_invalid_or_too_long_pattern_is_refused(text):
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
def test_a_search_for_all_patterns_of_a_step_takes_less_than_half_a_second(text):
    pattern = Pattern(text)
    worst_s = max(min(_cpu_s(pattern, repeated * 4000) for _ in range(3)) for repeated in ("a", "k", "ab", "ä"))
    assert worst_s / pattern.program * MAX_PROGRAMS < 0.5  # seconds of CPU; measured 0.1


def test_the_total_program_size_of_the_patterns_of_a_step_is_limited():
    rule = {"if": {"text": "a{900}"}, "then": "busy"}
    program_size = Pattern("a{900}").program
    assert program_size <= MAX_PROGRAM
    max_rules = MAX_PROGRAMS // program_size
    Description.model_validate({"submit": {"rules": [rule] * max_rules}})
    for step in ("submit", "health"):
        with pytest.raises(ValidationError, match="for long together"):
            Description.model_validate({step: {"path": "/x", "rules": [rule] * (max_rules + 1)}})
    event_rules = [{"if": {"text": "a{900}"}, "then": "skip"}] * (max_rules + 1)
    with pytest.raises(ValidationError, match="for long together"):
        Description.model_validate({"submit": {"stream": {"rules": event_rules}}})
