"""Queries over many jobs return lists, the queue, and the runs of each server."""

from itertools import product
from typing import Any

import pytest
from sqlalchemy import event

from routing.admission.labels import decode_labels, encode_labels, label_text
from routing.queries import job_list
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import job_labels
from slotkeeper.outbox import retention
from tests.support.builders import SECOND, T0, a_delayed_job, a_job, a_job_in, a_queued_job, rows_in

HOUR = 3600 * SECOND
_PAGE = 5000


def test_a_listing_starts_with_the_newest_job_and_its_cursor_skips_and_repeats_none(store):
    ids = [a_queued_job(store).id for _ in range(7)]
    page, seen = job_list.find_jobs(store.database, limit=3), []
    while page:
        seen += [job.id for job in page]
        assert len(seen) <= len(ids)
        a_queued_job(store, model="new")  # accepted between two pages
        page = job_list.find_jobs(store.database, limit=3, before_seq=page[-1].seq)
    assert seen == ids[::-1]


def test_listing_filters_by_state_model_and_tenant_together(store):
    wanted = a_queued_job(store, model="flux", tenant="acme")
    a_queued_job(store, model="flux")
    a_queued_job(store, tenant="acme")
    a_job_in(store, State.RUNNING, model="flux", tenant="acme")
    found = job_list.find_jobs(store.database, state=State.QUEUED, model="flux", tenant="acme")
    assert [job.id for job in found] == [wanted.id]
    assert (found[0].payload, found[0].result) == (None, None)  # lists stay small


_ODD = {"a": "1", "b/c": '\\"\\\\', "d": "", "e": "ä,[]{}'%:x"}
"""Values with what JSON, SQL and the stored text use for themselves."""


@pytest.mark.parametrize("tenant", [None, "acme"])
@pytest.mark.parametrize(("counted", "at_once"), [(1000, 1000), (1, 2)])
def test_listing_by_labels_finds_what_has_all_of_them(store, tenant, counted, at_once, monkeypatch):
    monkeypatch.setattr(job_list, "_MOST_COUNTED", counted)
    monkeypatch.setattr(job_list, "_MOST_AT_ONCE", at_once)
    labelled = [{"run": "7"}, {"run": "7", "team": "search"}, {"team": "search"}, {"team": "Search"}, {}, _ODD]
    every = [
        a_queued_job(store, tenant=owner, model=model, labels=encode_labels(labels), batch=batch)
        for owner, model, batch in product(("acme", "other"), ("flux", "zimg"), (None, "b1"))
        for labels in labelled
    ]
    wanted = ({"run": "7"}, {"team": "search"}, {"run": "7", "team": "search"}, {"run": "8"}, {"team": "sea"}, _ODD)
    for labels, model, batch in product(wanted, (None, "flux"), (None, "b1")):
        asked = {"labels": [label_text(*label) for label in labels.items()], "model": model, "batch": batch}
        found = page = job_list.find_jobs(store.database, tenant=tenant, limit=3, **asked)
        while page:
            page = job_list.find_jobs(store.database, tenant=tenant, limit=3, before_seq=page[-1].seq, **asked)
            found = found + page
        assert [job.id for job in found] == [
            job.id
            for job in reversed(every)
            if labels.items() <= decode_labels(job.labels).items()
            and tenant in {None, job.tenant}
            and model in {None, job.model}
            and batch in {None, job.batch}
        ]


def test_a_job_that_is_deleted_takes_its_labels_with_it_and_no_others(store):
    kept = a_queued_job(store, labels=encode_labels({"run": "7"}))
    a_job_in(store, State.COMPLETED, labels=encode_labels(_ODD | {"run": "7"}))
    assert rows_in(store.database, job_labels) == 1 + 1 + len(_ODD)
    assert retention.delete_ended_jobs(store.database, T0 + HOUR) == 1
    assert rows_in(store.database, job_labels) == 1
    assert [job.id for job in job_list.find_jobs(store.database, labels=["run=7"])] == [kept.id]


def test_queued_jobs_are_listed_in_order_of_acceptance_and_in_pages(store):
    ids = [a_queued_job(store, model=model).id for model in ("zimg", "flux", "zimg", "trellis", "zimg")]
    a_delayed_job(store)
    first = store.list_queued(["zimg", "flux"], limit=2)
    rest = store.list_queued(["zimg", "flux"], after_seq=first[-1].seq)
    assert [w.id for w in first + rest] == [ids[0], ids[1], ids[2], ids[4]]
    assert store.list_queued([]) == []


@pytest.mark.parametrize("models", [1, 7, 150])
def test_queued_jobs_of_many_models_are_read_in_order_and_each_model_only_as_far_as_needed(store, models):
    """One model has most jobs.  A statement that reads several models requests a share of the page for each model."""
    names = [f"m{n}" for n in range(models)]
    jobs = [a_job(model="m0" if n % 3 else names[n % models]) for n in range(600)]
    numbers = [one.seq for one in store.submit(jobs, T0)]
    a_queued_job(store, model="another")
    asked: list[Any] = []

    @event.listens_for(store.database.engine, "before_cursor_execute")
    def note(_: Any, __: Any, ___: str, parameters: Any, *____: Any) -> None:
        asked.append(list(parameters.values() if isinstance(parameters, dict) else parameters))

    found, after = [], 0
    while batch := store.list_queued(names, after, _PAGE):
        found += [job.seq for job in batch]
        after = batch[-1].seq
    assert found == numbers
    assert all(values.count(_PAGE) <= 1 for values in asked)


def test_order_1_jobs_are_numbered_as_they_are_accepted(store):
    numbers = [a_queued_job(store).seq for _ in range(5)]
    assert numbers == sorted(set(numbers))


def test_a_task_message_can_be_written_without_the_payload(store):
    job = a_queued_job(store, priority=2, envelope='{"link":1}')
    assert store.get_message_headers(job.id) == ("zimg", 2, 0, '{"link":1}')
