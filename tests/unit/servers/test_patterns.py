import time

import pytest

from tasks.servers.patterns import TEXT_LIMIT, compile_pattern, found


@pytest.mark.parametrize(
    "text", ["queue (is )?full", r'"type":\s*"Busy"', "(?i)oom|out of memory", "[0-9]{3,5} ms", "^x$"]
)
def test_an_ordinary_pattern_is_accepted(text):
    compile_pattern(text)


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+b",
        "(a|aa)*b",
        "(a*)*",
        "(.*a){20}",
        "a*a*b",
        ".*.*=",
        "a?" * 30 + "a" * 30,
        "(a|a)" * 30,
        "(?=(a+)+b)x",
        "(?:(a+)+b)",
        "(?>(a+)+)b",
        r"(a)\1",
        ".{0,4000}.{0,4000}x",
        "a*" + "a" * 190 + "b",
        "a*a{1000}b",
        "a*(?=a{1000}b)",
        "a*(?:(?:a{10}){10}){10}b",
        "a{0,300}.{900}b",
    ],
)
def test_a_pattern_that_could_run_away_is_refused(text):
    with pytest.raises(ValueError, match=r"very long|own groups"):
        compile_pattern(text)


@pytest.mark.parametrize("text", ["", "x" * 201, "(", "a{9999999999999}", "[z-a]"])
def test_what_is_no_pattern_or_too_long_is_refused(text):
    with pytest.raises(ValueError, match=r"1 to 200|not a regular|very long"):
        compile_pattern(text)


def test_only_the_beginning_of_a_text_is_searched():
    assert found(compile_pattern("x"), "a" * (TEXT_LIMIT - 1) + "x")
    assert not found(compile_pattern("x"), "a" * TEXT_LIMIT + "x")


@pytest.mark.parametrize("text", ["a*" + "a" * 96 + "b", "a*" + "." * 97 + "b", "a{0,150}.{600}b", "a*?.{97}b"])
def test_the_worst_accepted_patterns_end_soon(text):
    started = time.thread_time()
    found(compile_pattern(text), "a" * 100_000)
    assert time.thread_time() - started < 3  # seconds of CPU; measured 0.3
