"""Commands about the order and the placement of jobs: constraints, attributes, pausing, explaining."""

import json
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from app.cli.__main__ import main
from app.cli.arguments import parse_number, read_attributes, read_constraints
from tests.support.api import clear_wiring

RECEIPT = {"job_id": "j-1", "status": "queued", "next_step": "waiting", "position": 3, "notice": None}
SERVER = {
    "server": "gpu/1",
    "fleet": "zimg",
    "state": "paused",
    "reason": "new driver",
    "changed_by": "boss",
    "slots": 2,
    "weight": 2.0,
    "attributes": {"gpu": "A100", "labels": ["fast", "testnet"]},
    "models": {"zimg": "http://gpu1/x"},
    "quarantined": [],
    "running": 1,
    "free": 1,
    "blocked_by": None,
}
STANDING = {
    "free": 1,
    "cooling": 0,
    "taken": 1,
    "breaker": "closed",
    "breaker_until": None,
    "away_since": None,
    "away_why": None,
    "silent_since": None,
    "scores": {"zimg": {"load": 0.5, "failures": 0, "slowness": -0.25, "swap": 0, "silence": 0, "total": 0.625}},
}


@pytest.fixture
def api(httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> HTTPServer:
    monkeypatch.setenv("SLOTKEEPER_URL", httpserver.url_for(""))
    return httpserver


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def answers(api: HTTPServer, method: str, path: str, body: Any) -> list[Request]:
    """Answer with this; the requests that came."""
    seen: list[Request] = []

    def handle(request: Request) -> Response:
        request.get_data()
        seen.append(request)
        return Response(json.dumps(body))

    api.expect_request(path, method=method).respond_with_handler(handle)
    return seen


# -- NAME=VALUE ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "texts, read",
    [
        (["gpu=A100,H100"], {"gpu": ["A100", "H100"]}),
        (["region = eu"], {"region": "eu"}),
        (["memory>=40", "memory<=80.5"], {"memory": {"min": 40, "max": 80.5}}),
        (["cores=8", "version=12.10", "model_version=1.0"], {"cores": 8, "version": "12.10", "model_version": "1.0"}),
        ([], {}),
    ],
)
def test_constraints_are_parsed_from_the_command_line(texts: list[str], read: dict[str, Any]) -> None:
    assert read_constraints(texts) == read


@pytest.mark.parametrize(
    "texts",
    [
        ["gpu"],
        ["=A100"],
        ["gpu="],
        ["memory>40"],
        ["memory>=much"],
        ["memory>=nan"],
        ["memory>=inf"],
        ["memory>=1", "memory>=2"],
        ["gpu=A100", "gpu=H100"],
        ["gpu=A100", "gpu>=1"],
        ["gpu>=1", "gpu=A100"],
    ],
)
def test_constraints_that_are_none_are_wrong_usage(texts: list[str]) -> None:
    with pytest.raises(click.UsageError) as refused:
        read_constraints(texts)
    assert repr(texts[-1]) in refused.value.message


def test_attributes_are_parsed_from_the_command_line() -> None:
    read = read_attributes(["gpu=A100", "memory=80", "labels=fast,testnet"])
    assert read == {"gpu": "A100", "memory": 80, "labels": ["fast", "testnet"]}
    for texts in (["gpu"], ["memory>=80"], ["gpu=A100", "gpu=H100"]):
        with pytest.raises(click.UsageError):
            read_attributes(texts)


@pytest.mark.parametrize("text", ["1.0", "12.10", "007", "1e3", "1_000", "inf", "nan", "9" * 20, "-0", "A100"])
def test_a_number_that_would_be_displayed_differently_stays_a_text(text: str) -> None:
    assert parse_number(text) == text


@pytest.mark.parametrize("text, number", [("80", 80), ("-1", -1), ("40.5", 40.5), ("0", 0)])
def test_a_number_is_a_number(text: str, number: float) -> None:
    assert parse_number(text) == number


# -- submit, explain -----------------------------------------------------------------------------------------------


def test_submit_sends_the_constraints_and_prints_the_notice_to_stderr(api: HTTPServer) -> None:
    notice = "At present no known server of model 'zimg' meets gpu=H100; the job waits until one does."
    seen = answers(api, "POST", "/queue/submit", RECEIPT | {"notice": notice})
    done = run("submit", "zimg", "--constraint", "gpu=A100,H100", "--constraint", "memory>=40")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "j-1  queued  position 3\n", notice + "\n")
    assert seen[0].get_json()["constraints"] == {"gpu": ["A100", "H100"], "memory": {"min": 40}}


def test_terms_of_a_job_go_with_it_as_numbers(api: HTTPServer) -> None:
    api.expect_request("/queue/submit", method="POST").respond_with_json({"job_id": "j1", "status": "queued"}, 202)
    words = ("--environment", "testnet", "--expected-output", "512", "--cancel-when-gone", "7.5")
    done = run("submit", "zimg", *words, "--on-failure", "max_retries=3", "--on-failure", "jitter=0.2")
    assert done.exit_code == 0, done.output
    sent = api.log[0][0].json
    assert {name: sent[name] for name in sent if name not in ("model", "payload")} == {
        "environment": "testnet",
        "expected_output": 512,
        "cancel_when_gone": 7.5,
        "on_failure": {"max_retries": 3, "jitter": 0.2},
    }
    for wrong in (("--expected-output", "many"), ("--cancel-when-gone", "1"), ("--on-failure", "never")):
        assert run("submit", "zimg", *wrong).exit_code == 2, wrong


def test_without_constraints_none_are_sent(api: HTTPServer) -> None:
    seen = answers(api, "POST", "/queue/submit", RECEIPT)
    run("submit", "zimg")
    assert "constraints" not in seen[0].get_json()


def test_labels_go_with_the_job_and_select_jobs_of_the_list(api: HTTPServer) -> None:
    seen = answers(api, "POST", "/queue/submit", RECEIPT)
    assert run("submit", "zimg", "--label", "team=search", "--label", "note=a=b").exit_code == 0
    assert seen[0].get_json()["labels"] == {"team": "search", "note": "a=b"}
    seen = answers(api, "GET", "/queue/jobs", {"jobs": [], "next_cursor": None})
    assert run("jobs", "--label", "team=search", "--label", "run=7").exit_code == 0
    assert seen[0].args.getlist("label") == ["team=search", "run=7"]
    for wrong in (["--label", "team"], ["--label", "a=1", "--label", "a=2"]):
        assert run("submit", "zimg", *wrong).exit_code == 2


def test_a_wrong_constraint_is_wrong_usage(api: HTTPServer) -> None:
    done = run("submit", "zimg", "--constraint", "memory>40")
    assert (done.exit_code, api.log) == (2, [])
    assert "memory>=40" in done.stderr


@pytest.mark.parametrize(
    "more, printed",
    [
        ({"next_step": "starting", "position": None, "estimated_start_s": 0.0}, "j-1  queued  starting"),
        (
            {"estimated_start_s": 90.0},
            "j-1  queued  position 3  starts in about 90 s",
        ),
        ({"status": "delayed", "next_step": "later", "position": None}, "j-1  delayed"),
    ],
)
def test_a_receipt_is_one_line(api: HTTPServer, more: dict[str, Any], printed: str) -> None:
    answers(api, "POST", "/queue/submit", RECEIPT | more)
    assert run("submit", "zimg").stdout == printed + "\n"


def test_an_explanation_is_its_sentence_and_its_parts(api: HTTPServer) -> None:
    found = {
        "sentence": "It waits: the slot that could run it is taken, and 1 job of its model comes before it.",
        "ahead": 1,
        "before": ["01a1-first"],
        "policy": "aging",
        "longest_overtaking_s": 240.0,
        "servers": {"gpu1": "busy", "gpu2": None},
        "estimated_start_s": 120.0,
        "estimate_basis": {"jobs_before": 1, "mean_run_s": 120.0, "slots": 2},
    }
    answers(api, "GET", "/queue/jobs/j-1/explain", found)
    lines = run("explain", "j-1").stdout.splitlines()
    assert lines[:6] == [
        found["sentence"],
        "The job starts in about 120 s: 1 before it, 120 s a run, 2 slots.",
        "jobs ahead   1",
        "just before  01a1-first",
        "policy       aging",
        "overtaken    only by jobs that are submitted up to 240 s later",
    ]
    rows = [line.split() for line in lines[6:]]
    assert ["gpu1", "busy"] in rows and ["gpu2", "can", "take", "the", "job"] in rows
    assert json.loads(run("explain", "j-1", "--json").stdout) == found


# -- servers, models, tenants --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["servers", "models", "tenants"])
@pytest.mark.parametrize(
    "word, state", [("pause", "paused"), ("drain", "draining"), ("freeze", "frozen"), ("resume", "online")]
)
def test_each_kind_of_resource_can_be_stopped_and_resumed(api: HTTPServer, kind: str, word: str, state: str) -> None:
    seen = answers(api, "PATCH", f"/admin/{kind}/a/b", {})
    done = run(kind, word, "a/b", "--reason", "new driver")
    assert (done.exit_code, done.stdout) == (0, f"a/b is {state} (new driver).\n")
    assert seen[0].get_json() == {"state": state, "reason": "new driver"}
    assert run(kind, word, "a/b").stdout == f"a/b is {state}.\n"
    assert seen[1].get_json() == {"state": state}


def test_a_server_is_registered_with_what_it_declares(api: HTTPServer) -> None:
    seen = answers(api, "POST", "/admin/register", {"slots": 1})
    reasons = [
        {"code": "nothing_waits", "sentence": "no job waits"},
        {"code": "down", "sentence": "nobody answers"},
        {"code": "no_worker", "sentence": "no worker is alive"},
    ]
    answers(api, "GET", "/admin/servers/gpu1/check", {"reasons": reasons})
    words = ["zimg", "gpu1", "http://gpu1/x", "--attribute", "gpu=A100", "--attribute", "memory=80", "--weight", "2"]
    done = run("servers", "register", *words, "--model-version", "2.1")
    assert (done.exit_code, done.stdout) == (0, "gpu1 serves zimg on 1 slot.\n")
    expected = "It gets no jobs now: nobody answers; no worker is alive.\n"
    assert done.stderr == expected, "the command warns at once if no job can start on the server"
    sent = seen[0].get_json()
    assert (sent["attributes"], sent["weight"], sent["model_version"]) == ({"gpu": "A100", "memory": 80}, 2, "2.1")
    assert "runtime" not in sent
    run("servers", "register", *words[:3])
    assert seen[1].get_json() == {"model": "zimg", "server": "gpu1", "endpoint": "http://gpu1/x"}
    assert run("servers", "register", *words[:3], "--weight", "0").exit_code == 2


def test_a_server_is_shown_with_the_parts_of_its_score(api: HTTPServer) -> None:
    answers(api, "GET", "/admin/servers/gpu/1", SERVER | {"status": STANDING})
    done = run("servers", "show", "gpu/1")
    facts = dict(line.split("  ", 1) for line in done.stdout.splitlines() if "  " in line)
    assert facts["reason"].strip() == "new driver"
    assert facts["attributes"].strip() == "gpu=A100 labels=fast,testnet"
    row = next(line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["zimg"])
    assert row == ["zimg", "http://gpu1/x", "0.500", "0.000", "-0.250", "0.000", "0.000", "0.625"]


def test_tenants_are_listed_with_how_they_stand(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slotkeeper.registry.identity import Tenant
    from slotkeeper.registry.tenant_limits import TenantLimits
    from slotkeeper.registry.tenants import Tenants
    from tasks import services

    monkeypatch.setenv("SLOTKEEPER_DATABASE_URL", sqlite_url)
    clear_wiring()
    Tenants(services.database()).add(Tenant("acme"), 0, limits=TenantLimits(rate_per_s=5))
    services.catalog().set_tenant_state("celery", "frozen")
    rows, listed = run("tenants", "list").stdout, json.loads(run("tenants", "list", "--json").stdout)
    clear_wiring()
    assert [row.split() for row in rows.splitlines()[3:5]] == [
        ["acme", "1", "no", "5", "-", "online"],
        ["celery", "0", "no", "-", "-", "frozen"],
    ]
    assert [(one["name"], one["rate_per_s"], one["state"]) for one in listed] == [
        ("acme", 5, "online"),
        ("celery", None, "frozen"),
    ]


def test_the_list_of_servers_shows_breakers_and_cooldowns(api: HTTPServer) -> None:
    broken = {"breaker": "open", "breaker_why": "rate", "breaker_until": "2026-01-01T00:00:08.000Z"}
    cooling = {"cooling": 2, "cooldown_until": "2026-01-01T00:00:03.000Z"}
    statuses = [STANDING, STANDING | broken | cooling, None]
    listed = [SERVER | {"server": f"gpu{n}", "status": status} for n, status in enumerate(statuses)]
    answers(api, "GET", "/admin/servers", {"servers": listed, "fleets": None})
    well, ill, unknown = run("servers", "list").stdout.strip().splitlines()[-3:]
    assert "ok" in well and "rate" not in unknown
    assert "breaker open (rate) until 2026-01-01T00:00:08.000Z, 2 in cooldown until 2026-01-01T00:00:03.000Z" in ill


def test_the_list_of_servers_shows_since_when_a_server_is_away(api: HTTPServer) -> None:
    away = SERVER | {"status": STANDING | {"away_since": "2026-01-01T00:00:01.000Z"}}
    answers(api, "GET", "/admin/servers", {"servers": [away], "fleets": None})
    assert "away since 2026-01-01T00:00:01.000Z" in run("servers", "list").stdout


def test_servers_reset_sends_the_request_to_the_api(api: HTTPServer) -> None:
    answers(api, "POST", "/admin/servers/gpu/1/reset", SERVER | {"status": STANDING})
    assert run("servers", "reset", "gpu/1").stdout == "gpu/1 is paused; ok.\n"


def test_a_server_is_shown_while_redis_is_down(api: HTTPServer) -> None:
    answers(api, "GET", "/admin/servers", {"servers": [SERVER | {"status": None}], "fleets": None})
    answers(api, "GET", "/admin/servers/gpu/1", SERVER | {"status": None})
    assert "Redis does not answer" in run("servers", "show", "gpu/1").stdout
    assert "gpu=A100 labels=fast,testnet" in run("servers", "list").stdout


def test_a_model_is_shown_with_its_longest_wait(api: HTTPServer) -> None:
    model = {
        "model": "zimg",
        "state": "online",
        "policy": "aging",
        "servers": ["gpu1", "gpu2"],
        "waiting": 3,
        "load": {"mean_run_s": 60.0, "work_s": 90.0, "limit": None, "breaker": "closed", "breaker_until": None},
        "longest_overtaking_s": {"1": 0.0},
        "longest_wait": "A job of priority 5 waits for …",
    }
    config = {"model": "zimg", "config": {"policy": "aging", "max_retries": 50}, "overrides": {"policy": "aging"}}
    answers(api, "GET", "/admin/models/zimg", model)
    answers(api, "GET", "/admin/model-configs/zimg", config)
    shown = run("models", "show", "zimg").stdout
    assert (
        "A job of priority 5 waits for …\nThe waiting jobs are about 90 s of work for the slots of the model.\n"
        in shown
    )
    assert "policy *" in shown and "gpu1, gpu2" in shown
    assert json.loads(run("models", "show", "zimg", "--json").stdout) == model | config


def test_attempts_are_numbered_as_the_job_counts_them(api: HTTPServer) -> None:
    attempt = {"slot": "gpu1-slot0", "started_at": "x", "ended_at": "y", "outcome": "finished", "error": None}
    met_none = attempt | {"attempt": 3, "unreached": 3, "outcome": "server_unreachable"}
    answers(api, "GET", "/queue/jobs/j-1/attempts", {"attempts": [met_none, attempt | {"attempt": 4, "unreached": 0}]})
    rows = [line.split() for line in run("attempts", "j-1").stdout.splitlines() if "gpu1-slot0" in line]
    assert [row[0] for row in rows] == ["-", "1"]
