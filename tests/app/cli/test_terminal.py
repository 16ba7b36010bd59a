"""Commands escape the control characters in all data from outside before they print it."""

import json
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pytest_httpserver import HTTPServer
from rich.console import Console
from werkzeug import Request, Response

from app.cli.__main__ import main
from app.terminal import console, escape_controls, escape_line, safe_json
from app.up import demonstration
from tools.drill.score_card import ScoreCard

HOSTILE = {
    "an escape": "\x1b[31mred\x1b[2J",
    "the clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "a title": "\x1b]0;root@host\x1b\\",
    "a link": "\x1b]8;;http://evil.test\x07click\x1b]8;;\x07",
    "8 bits": "\x9b31m\x9d52;c;x\x9c\x90",
    "bells and backspaces": "a\x07\x08\x7f\x0b\x0c",
    "a return": "all is well\rpwned",
    "another direction": "\u202egnp.exe\u2066x\u2069\u200f",
    "nothing to see": "a\u200b\ufeff\U000e0041b",
    "half a pair": "\ud800",
    "markup": "[/INST] [/usr/lib/x] [(scratch)] [link=http://evil.test]x[/link] [red]",
    "emoji codes": ":skull: :bomb:",
}
TEXT = "<".join(HOSTILE.values())
JOB = {
    "job_id": "j-1",
    "model": TEXT,
    "status": "completed",
    "priority": 5,
    "attempts": 1,
    "tenant": TEXT,
    "slot": TEXT,
    "created_at": "2026-01-01T00:00:00.000Z",
    "started_at": "2026-01-01T00:00:00.000Z",
    "completed_at": "2026-01-01T00:00:01.000Z",
    "result": TEXT,
    "error": {"code": "job_failed", "message": TEXT},
    "constraints": {TEXT: [TEXT]},
}
ENDED = {**JOB, "error": None}
SERVER = {
    "server": "gpu1",
    "fleet": TEXT,
    "state": "paused",
    "reason": TEXT,
    "slots": 1,
    "models": {TEXT: TEXT},
    "attributes": {TEXT: [TEXT]},
    "status": {
        "breaker": TEXT,
        "breaker_why": TEXT,
        "breaker_until": TEXT,
        "cooling": 1,
        "cooldown_until": TEXT,
        "away_since": TEXT,
        "scores": {},
    },
    "running": 1,
    "free": 0,
    "blocked_by": TEXT,
    "quarantined": [{"sentence": TEXT}],
}
FLEET = {"fleet": TEXT, "waiting": 1, "taken": 0, "free": 1, "cooling": 0}
MODEL = {"model": TEXT, "state": "paused", "reason": TEXT, "model_type": "sync", "policy": "fifo", "slots": 1}
MODEL |= {"waiting": 0, "servers": [TEXT], "load": {"work_s": 1, TEXT: TEXT}, "longest_wait": TEXT}
CONFIG = {"model": TEXT, "config": {"id_field": TEXT, "weights": {TEXT: 1}}, "overrides": {"id_field": TEXT}}
ATTEMPT = {"attempt": 1, "unreached": 0, "slot": TEXT, "started_at": "x", "ended_at": "y", "outcome": TEXT}
ATTEMPT |= {"error": {"code": TEXT, "message": TEXT}}
EXPLAINED = {
    "sentence": TEXT,
    "ahead": 1,
    "before": [TEXT],
    "policy": TEXT,
    "longest_overtaking_s": None,
    "servers": {TEXT: TEXT},
}
LEDGER = {"by_state": {TEXT: 1}, "purged": {}, "balanced": True, "accepted": 1}
PAGE = {"jobs": [JOB], "next_cursor": None}
SECRETS = {"tenant": TEXT, "secrets": [TEXT], "rotation": 1, "former_until": TEXT}

# The words of a command, and what the API answers to each path that it asks for.
COMMANDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "submit": (["submit", "m"], {"/queue/submit": {**JOB, "notice": TEXT}}),
    "submit --wait": (
        ["submit", "m", "--wait"],
        {"/queue/submit": {**ENDED, "status": "queued", "notice": None}, "/queue/jobs/j-1": ENDED},
    ),
    "jobs": (["jobs"], {"/queue/jobs": PAGE}),
    "job": (["job", "j-1"], {"/queue/jobs/j-1": JOB}),
    "explain": (["explain", "j-1"], {"/queue/jobs/j-1/explain": EXPLAINED}),
    "cancel": (["cancel", "j-1"], {"/queue/jobs/j-1/cancel": {"job_id": TEXT, "status": TEXT}}),
    "attempts": (["attempts", "j-1"], {"/queue/jobs/j-1/attempts": {"attempts": [ATTEMPT]}}),
    "dlq list": (["dlq", "list"], {"/admin/dlq": PAGE}),
    "dlq show": (
        ["dlq", "show", "j-1"],
        {"/queue/jobs/j-1": JOB, "/queue/jobs/j-1/attempts": {"attempts": [ATTEMPT]}},
    ),
    "servers list": (["servers", "list"], {"/admin/servers": {"servers": [SERVER], "fleets": [FLEET]}}),
    "servers show": (["servers", "show", "gpu1"], {"/admin/servers/gpu1": SERVER}),
    "servers reset": (["servers", "reset", "gpu1"], {"/admin/servers/gpu1/reset": SERVER}),
    "servers pause": (["servers", "pause", "gpu1", "--reason", TEXT], {"/admin/servers/gpu1": SERVER}),
    "models list": (["models", "list"], {"/admin/models": {"models": [MODEL]}}),
    "models show": (["models", "show", "m"], {"/admin/models/m": MODEL, "/admin/model-configs/m": CONFIG}),
    "models configure": (
        ["models", "configure", "m", "id_field=x"],
        {"/admin/model-configs/m": CONFIG, "/admin/models/m": MODEL},
    ),
    "ledger": (["ledger"], {"/admin/ledger": LEDGER}),
    "webhooks secret": (["webhooks", "secret"], {"/admin/webhook-secrets/default": SECRETS}),
}
# What an answer in words looks like when it is a refusal.
REFUSAL = {"title": TEXT, "detail": TEXT, "status": 422, "code": "x"}


@pytest.fixture
def api(httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> HTTPServer:
    monkeypatch.setenv("SLOTKEEPER_URL", httpserver.url_for(""))
    return httpserver


def _run(words: list[str]) -> Result:
    return CliRunner().invoke(main, words, env={"COLUMNS": "200"})


def _answering(body: Any, status: int = 200) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        request.get_data()
        return Response(json.dumps(body), status)

    return answer


def _assert_harmless(printed: str) -> None:
    wild = {ch for ch in printed if ch != "\n" and not ch.isprintable()}
    assert not wild, f"{wild!r} in {printed!r}"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_output_of_a_command_contains_no_control_characters(api: HTTPServer, command: str) -> None:
    words, paths = COMMANDS[command]
    for path, body in paths.items():
        api.expect_request(path).respond_with_handler(_answering(body))
    done = _run(words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    _assert_harmless(done.output)
    assert "\\x1b" in done.output.replace("\n", ""), "the character is escaped, not removed"
    if "--json" not in words:
        assert "💀" not in done.output


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("servers pause", "submit --wait")])
def test_json_is_the_same_value_and_holds_no_controls(api: HTTPServer, command: str) -> None:
    words, paths = COMMANDS[command]
    for path, body in paths.items():
        api.expect_request(path).respond_with_handler(_answering(body))
    done = _run([*words, "--json"])
    _assert_harmless(done.stdout)
    printed = json.dumps(json.loads(done.stdout))
    assert json.dumps(TEXT)[1:-1] in printed


@pytest.mark.parametrize("command", COMMANDS)
def test_an_error_of_the_api_is_printed_without_control_characters(api: HTTPServer, command: str) -> None:
    words, paths = COMMANDS[command]
    for path in paths:
        api.expect_request(path).respond_with_handler(_answering(REFUSAL, 422))
    done = _run(words)
    assert done.exit_code == 1
    _assert_harmless(done.output)
    assert "Error: \\x1b[31mred" in done.output


def test_an_error_of_a_line_of_a_file_is_printed_without_control_characters(api: HTTPServer) -> None:
    batch = {"batch": "b", "status": "active", "next_line": 0, "refused": 1, "jobs": 0, "ended": 0, "by_state": {}}
    error = {"line": 0, "custom_id": None, "code": "x", "field": "line", "message": TEXT}
    for path, body in {
        "/batches": batch,
        "/batches/b/lines": {"next_line": 1},
        "/batches/b/close": batch | {"next_line": 1},
        "/batches/b/errors": {"errors": [error], "next_line": None},
    }.items():
        api.expect_request(path).respond_with_handler(_answering(body))
    done = CliRunner().invoke(main, ["submit-file", "-"], input="{}\n")
    _assert_harmless(done.output)
    assert "Line 1:" in done.output


def test_the_live_view_contains_no_control_characters(api: HTTPServer) -> None:
    from app.cli.operation_commands import _render_view
    from slotkeeper.client import Client

    for path, body in {
        "/admin/servers": {"servers": [SERVER], "fleets": [FLEET]},
        "/queue/jobs": PAGE,
        "/admin/ledger": LEDGER,
    }.items():
        api.expect_request(path).respond_with_handler(_answering(body))
    _assert_harmless(_printed(_render_view(Client(api.url_for("")))))


def _printed(*values: Any) -> str:
    screen: Console = console()
    screen.file = StringIO()
    for value in values:
        screen.print(value)
    found: str = screen.file.getvalue()
    return found


def test_the_demonstration_and_the_drill_print_text(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = _printed(demonstration._table([JOB]), demonstration._error_of(JOB), demonstration._compact(JOB["result"]))
    _assert_harmless(printed)
    monkeypatch.setattr(ScoreCard, "_rows", lambda self: [(TEXT, TEXT, True), ("x", TEXT, False), ("y", TEXT, None)])
    monkeypatch.setattr(ScoreCard, "details", lambda self: [TEXT])
    monkeypatch.setattr(ScoreCard, "passed", True)
    monkeypatch.setattr(ScoreCard, "command", TEXT, raising=False)
    screen = console()
    screen.file = StringIO()
    ScoreCard.show(object.__new__(ScoreCard), screen)
    _assert_harmless(screen.file.getvalue())
    assert "[/INST]" in printed + screen.file.getvalue()


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_text_is_shown_with_visible_escapes(kind: str) -> None:
    _assert_harmless(escape_controls(HOSTILE[kind]))
    _assert_harmless(_printed(HOSTILE[kind]))
    assert escape_controls(escape_controls(HOSTILE[kind])) == escape_controls(HOSTILE[kind])


@pytest.mark.parametrize(
    "text", ["Größe 10 €", "日本語 ひらがな", "🎨 עברית عربي", "a\u00a0b", "two\nlines\tand a tab", ""]
)
def test_printable_text_is_not_changed(text: str) -> None:
    assert escape_controls(text) == text
    assert json.loads(safe_json(text)) == text


def test_a_field_stays_in_its_line() -> None:
    assert escape_line("a\nb\tc") == "a\\nb\\tc"


@pytest.mark.parametrize("kind", HOSTILE)
def test_json_text_is_the_same_value(kind: str) -> None:
    written = safe_json({HOSTILE[kind]: [HOSTILE[kind]]}, indent=2)
    _assert_harmless(written)
    assert json.loads(written) == {HOSTILE[kind]: [HOSTILE[kind]]}
