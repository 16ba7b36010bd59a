"""The log has one bounded line for each event, without any data that a client or a server has sent."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from logging.handlers import QueueHandler

import pytest
import structlog

from slotkeeper import logs
from tests.house.tree import PACKAGES

PLANTED = "sk-PLANTED-0123456789"


@pytest.fixture(autouse=True)
def configured() -> None:
    logs.configure()


@pytest.fixture
def log_lines(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    def read() -> list[str]:
        assert logs.flush(10)
        return capsys.readouterr().err.splitlines()

    return read


def _fail(text: str, kind: type[Exception] = ValueError) -> None:
    local = text
    raise kind(local)


def test_an_event_is_one_line_with_its_facts(log_lines: Callable[[], list[str]]) -> None:
    structlog.get_logger("tasks.x").info("it_happened", job_id="j1", why="two words", count=3)
    (line,) = log_lines()
    assert line.endswith("Z info    it_happened job_id=j1 why='two words' count=3")


def test_long_values_are_cut_and_unprintable_characters_are_escaped(log_lines: Callable[[], list[str]]) -> None:
    structlog.get_logger("tasks.x").warning(
        "e", long="x" * 10_000, wild="a\nb\x1b]52;c\x07\u202e\x9b", many=["y" * 99] * 99
    )
    logging.getLogger("kombu").warning("%s", "z\x1b[31m" * 10_000)
    ours, theirs = log_lines()
    assert len(ours) < 3 * logs.MAX_VALUE_LENGTH
    assert len(theirs) <= logs.MAX_LINE_LENGTH
    assert (ours + theirs).isprintable()


@pytest.mark.parametrize("how", ["exception", "exc_info", "library"])
def test_an_error_is_one_line_with_its_type_and_places_and_without_its_text_or_locals(
    log_lines: Callable[[], list[str]], how: str
) -> None:
    log = structlog.get_logger("app.problems")
    try:
        _fail(PLANTED)
    except ValueError as error:
        if how == "exception":
            log.exception("it_failed", job_id="j1")
        elif how == "exc_info":
            log.error("it_failed", exc_info=error, job_id="j1")
        else:
            logging.getLogger("celery").exception("it_failed job_id=j1")
    (line,) = log_lines()
    assert "it_failed job_id=j1" in line and "ValueError in _fail (slotkeeper/test_logs.py:" in line
    assert PLANTED not in line and line.count("error=") == 1


@pytest.mark.parametrize("kind", [OSError, TypeError, RuntimeError])
def test_the_text_of_an_error_type_that_holds_no_client_data_is_logged(
    log_lines: Callable[[], list[str]], kind: type[Exception]
) -> None:
    try:
        _fail("no such file", kind)
    except kind:
        structlog.get_logger("app.x").exception("it_failed")
    assert f"{kind.__name__}: no such file in _fail" in log_lines()[0]


def test_a_celery_task_is_logged_without_arguments_and_results(log_lines: Callable[[], list[str]]) -> None:
    fields = {"name": "infer", "id": "j1", "runtime": 0.5, "description": "raised", "args": PLANTED, "kwargs": PLANTED}
    fields |= {"exc": PLANTED, "traceback": PLANTED, "return_value": PLANTED}
    trace = logging.getLogger("celery.app.trace")
    trace.error("Task %(name)s[%(id)s] %(description)s: %(exc)s\n%(traceback)s\n", fields)
    trace.error("\nTask %(name)s[%(id)s] succeeded in %(runtime)ss: %(return_value)s %(args)s %(kwargs)s", fields)
    assert [line.partition("error   ")[2] for line in log_lines()] == [
        "Task infer[j1] raised: …",
        "Task infer[j1] succeeded in 0.5s: … … …",
    ]


def test_a_library_message_is_logged_as_its_first_line_without_arguments(log_lines: Callable[[], list[str]]) -> None:
    consumer = logging.getLogger("celery.worker.consumer.consumer")
    consumer.error(
        "Can't decode message body: %r\n\nbody: %s", PLANTED, PLANTED, exc_info=(ValueError, ValueError(PLANTED), None)
    )
    (line,) = log_lines()
    assert "Can't decode message body" in line and PLANTED not in line


def test_an_error_that_ends_a_thread_is_logged_in_one_line(log_lines: Callable[[], list[str]]) -> None:
    thread = threading.Thread(target=_fail, args=(PLANTED,))
    thread.start()
    thread.join()
    (line,) = log_lines()
    assert "thread_failed" in line and "ValueError in _fail" in line and PLANTED not in line


def test_at_level_debug_the_text_of_an_error_is_logged(log_lines: Callable[[], list[str]]) -> None:
    logs.configure("DEBUG")
    try:
        _fail("the whole truth")
    except ValueError:
        structlog.get_logger("app.x").exception("it_failed")
    assert "ValueError: the whole truth" in log_lines()[0]


def test_our_packages_log_from_info_on_and_libraries_from_the_configured_level_on(
    log_lines: Callable[[], list[str]],
) -> None:
    for name in ("tasks.x", "celery.x"):
        logging.getLogger(name).info("quiet %s", name)
    structlog.get_logger("tasks.x").info("loud")
    assert [line.partition("info    ")[2] for line in log_lines()] == ["quiet tasks.x", "loud"]


def test_an_event_is_logged_once_when_logs_are_configured_twice(log_lines: Callable[[], list[str]]) -> None:
    logs.configure()
    structlog.get_logger("tasks.x").error("once")
    assert len(log_lines()) == 1
    assert sum(isinstance(handler, QueueHandler) for handler in logging.getLogger().handlers) == 1


def test_a_line_goes_to_the_current_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    structlog.get_logger("tasks.x").error("here")
    assert logs.flush(10)
    assert "here" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_each_json_line_is_an_object_with_its_facts_by_name(log_lines: Callable[[], list[str]]) -> None:
    logs.configure(form="json")
    structlog.get_logger("tasks.x").info("it_happened", job_id="j1", why="two words", count=3)
    logging.getLogger("kombu").warning("lost %s", "it")
    try:
        _fail(PLANTED)
    except ValueError:
        structlog.get_logger("app.x").exception("it_failed")
    ours, theirs, failed = map(json.loads, log_lines())
    assert ours.pop("at").endswith("Z")
    assert ours == {"level": "info", "event": "it_happened", "job_id": "j1", "why": "two words", "count": 3}
    assert (theirs["level"], theirs["event"]) == ("warning", "lost it")
    assert "ValueError in _fail" in failed["error"] and PLANTED not in str(failed)


def test_a_json_line_stays_valid_with_long_or_unprintable_facts(log_lines: Callable[[], list[str]]) -> None:
    logs.configure(form="json")
    wild = {f"fact{n}": "\ud800\x1b\u202e" * 999 for n in range(99)}
    structlog.get_logger("tasks.x").info("100 %s of it" * 999, job_id="j1", big=1 << 99, none=None, **wild)
    logging.getLogger("kombu").warning("z\x1b[31m" * 10_000)
    lines = log_lines()
    assert all(len(line) <= logs.MAX_LINE_LENGTH and line.isprintable() and json.loads(line) for line in lines)
    assert json.loads(lines[0])["job_id"] == "j1"


@pytest.mark.parametrize("name", [*sorted(PACKAGES), "__main__"])
def test_every_package_of_the_product_logs_from_info_on(log_lines: Callable[[], list[str]], name: str) -> None:
    structlog.get_logger(f"{name}.x").info("here")
    assert log_lines()[0].endswith(" here")


def test_a_bound_context_is_in_each_line_until_another_context_is_bound(
    log_lines: Callable[[], list[str]],
) -> None:
    log = structlog.get_logger("tasks.x")
    logs.bind_context(job_id="j1", tenant="acme")
    log.info("one")
    log.info("two", job_id="j2")
    logs.bind_context(job_id="j3")
    log.info("three")
    logs.bind_context()
    log.info("four")
    assert [line.partition("info    ")[2] for line in log_lines()] == [
        "one job_id=j1 tenant=acme",
        "two job_id=j2 tenant=acme",
        "three job_id=j3",
        "four",
    ]


# -- a reader that stalls ------------------------------------------------------------------------------------------

_LOGS_MUCH = """
import sys
import structlog
from slotkeeper import logs
logs.configure(form="json")
log = structlog.get_logger("slotkeeper.test")
for number in range(30_000):
    log.info("line", number=number)
print("done", logs.count_dropped_lines(), flush=True)
if sys.stdin.readline():
    assert logs.flush(60)
"""


@pytest.fixture
def stalled() -> Iterator[subprocess.Popen[str]]:
    """A process that logs more than its pipe and its queue hold, while no reader empties the pipe."""
    command = [sys.executable, "-c", _LOGS_MUCH]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.timeout(60)
def test_a_process_works_and_exits_although_no_reader_consumes_its_log(stalled: subprocess.Popen[str]) -> None:
    assert stalled.stdout is not None and stalled.stdin is not None
    assert stalled.stdout.readline().startswith("done ")
    stalled.stdin.close()
    assert stalled.wait() == 0


@pytest.mark.timeout(60)
def test_each_line_is_written_or_reported_as_dropped(stalled: subprocess.Popen[str]) -> None:
    assert stalled.stdout is not None and stalled.stderr is not None and stalled.stdin is not None
    dropped = int(stalled.stdout.readline().split()[1])
    print(file=stalled.stdin, flush=True)
    lines = [json.loads(line) for line in stalled.stderr]
    reports = [line["lines"] for line in lines if line["event"] == "log_lines_dropped"]
    assert dropped > 0 and sum(reports) == dropped
    assert len(lines) - len(reports) + dropped == 30_000


def test_lines_that_cannot_be_written_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    before = logs.count_dropped_lines()
    with open(writing, "w") as nobody:
        monkeypatch.setattr(sys, "stderr", nobody)
        structlog.get_logger("tasks.x").info("it_happened")
        assert logs.flush(10)
    assert logs.count_dropped_lines() == before + 1
