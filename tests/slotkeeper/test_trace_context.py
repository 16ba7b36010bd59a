"""The trace of a job, and the names of its spans."""

import pytest

from slotkeeper.trace_context import (
    find_trace,
    get_current_traceparent,
    get_process_traceparent,
    make_span_id,
    make_traceparent,
    parse_traceparent,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_traceparent_is_kept_as_it_came() -> None:
    assert parse_traceparent(GOOD) == GOOD


@pytest.mark.parametrize("given", [f"cc-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like"])
def test_the_known_fields_of_a_later_version_are_kept(given: str) -> None:
    assert parse_traceparent(given) == GOOD


def test_unknown_trace_flags_are_not_propagated() -> None:
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-fd") == GOOD


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01-",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"00-{TRACE}-{SPAN}-1",
        f" {GOOD}",
        f"{GOOD}\n",
        f"{GOOD}, {GOOD}",
        f"00-{TRACE}-{SPAN}-٠1",
    ],
)
def test_an_invalid_traceparent_is_ignored(given: str | None) -> None:
    assert parse_traceparent(given) is None


def test_a_job_is_in_the_trace_of_its_client_or_in_a_new_trace() -> None:
    assert find_trace("j1", GOOD) == (TRACE, SPAN, 1)
    own, other = find_trace("j1", None), find_trace("j2", None)
    assert own == find_trace("j1", None) and own.id != other.id and (own.parent, own.sampled) == ("", True)
    assert parse_traceparent(make_traceparent("j1", None, "attempt", 1)) is not None


@pytest.mark.parametrize("spoiled", ["", "x", "00-a-b", f"{GOOD}-more"])
def test_an_invalid_traceparent_in_the_database_is_ignored(spoiled: str) -> None:
    assert find_trace("j1", spoiled) == find_trace("j1", None)


def test_each_span_of_a_job_has_a_unique_id_that_any_process_can_compute() -> None:
    named = [make_span_id(job, kind, n) for job in ("j1", "j2") for kind in ("wait", "attempt") for n in (1, 2)]
    assert len(set(named)) == 8
    assert make_traceparent("j1", GOOD, "attempt", 2) == f"00-{TRACE}-{make_span_id('j1', 'attempt', 2)}-01"


def test_the_span_that_a_client_is_at_by_opentelemetry_is_found() -> None:
    provider = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed").TracerProvider()
    assert get_current_traceparent() is None
    with provider.get_tracer("test").start_as_current_span("a request") as span:
        context = span.get_span_context()
        found = parse_traceparent(get_current_traceparent())
        assert found is not None
        assert find_trace("j1", found)[:2] == (f"{context.trace_id:032x}", f"{context.span_id:016x}")
    assert get_current_traceparent() is None


def test_a_process_is_in_the_trace_that_its_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPARENT", GOOD)
    assert get_process_traceparent() == GOOD
    monkeypatch.delenv("TRACEPARENT")
    assert get_process_traceparent() is None
