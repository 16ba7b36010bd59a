"""`slotkeeper migrate --to` downgrades only if no process runs, and names the data to be lost before it asks."""

import pwd

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import inspect

from app.cli.__main__ import main
from tasks import services
from tests.support.api import Api, clear_wiring

_LOST = (
    "envelopes, nodes, node_keys, enrolment_tokens, "
    "validations, validation_answers, transfers, balance_parts, credit_accounts, prices, jobs.reserved, jobs.price, "
    "batches, batch_errors, usage_days, jobs.terms, tenants.limits, api_keys, catalog_changes, job_labels, "
    "jobs.given_times, queue_epochs, "
    "jobs.labels"
)


def _migrate(*words: str, answer: str = "") -> Result:
    return CliRunner().invoke(main, ["migrate", *words], input=answer)


def _has_labels(api: Api) -> bool:
    return "labels" in {column["name"] for column in inspect(api.database.engine).get_columns("jobs")}


@pytest.fixture
def a_process_runs(api: Api) -> None:
    services.processes().report("w1", {"role": "worker", "host": "here"})


def test_a_downgrade_names_the_dropped_data_and_asks_for_confirmation(api: Api) -> None:
    asked = _migrate("--to", "0001", answer="n\n")
    assert asked.exit_code == 1 and f"does not have {_LOST}: this drops them" in asked.output
    assert _migrate("--to", "0001").exit_code == 1, "the question was not answered"
    assert _has_labels(api)
    assert _migrate("--to", "0001", answer="y\n").exit_code == 0
    assert not _has_labels(api)


def test_going_forwards_drops_nothing_and_does_not_ask(api: Api, a_process_runs: None) -> None:
    assert _migrate("--to", "0001", "--yes", "--force").exit_code == 0
    forwards = _migrate("--to", "0003")
    assert forwards.exit_code == 0 and "drops" not in forwards.output
    assert _migrate().exit_code == 0 and _has_labels(api)


@pytest.mark.usefixtures("a_process_runs")
def test_a_downgrade_is_refused_while_a_process_runs(api: Api) -> None:
    refused = _migrate("--to", "0001", "--yes")
    assert refused.exit_code == 1 and "These processes run, and would fail: w1 (worker)." in refused.output
    assert _has_labels(api)
    services.processes().remove("w1")
    assert _migrate("--to", "0001", "--yes").exit_code == 0
    assert not _has_labels(api)


def test_a_user_without_a_name_may_migrate(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert _migrate().exit_code == 0


def test_without_redis_a_downgrade_warns_that_the_running_processes_are_unknown(mortal_api: Api) -> None:
    mortal_api.valkey.kill()
    clear_wiring()
    asked = _migrate("--to", "0001", answer="n\n")
    assert asked.exit_code == 1 and "it is not known whether processes run" in asked.output
    assert "Drop them?" in asked.output
