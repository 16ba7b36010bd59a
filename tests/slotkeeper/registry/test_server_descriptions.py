"""Versions of descriptions, and sealed secrets, in both databases."""

import pytest

from slotkeeper.errors import NotFound
from slotkeeper.jobs.states import Reason, State
from slotkeeper.registry import server_descriptions
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.server_descriptions import KEEP_UNUSED_MS, Secret
from tests.support.builders import SECOND, T0, a_queued_job, at_once
from tests.support.ends import store_end
from tools.cluster.direct_starts import store_remote_id, store_start

LATER = T0 + SECOND


@pytest.fixture
def catalog(database):
    return Catalog(database)


def _version(catalog, body, **overrides):
    described_by = catalog.configure("zimg", overrides, T0, body).described_by
    assert described_by == server_descriptions.hash_body(body)
    return described_by


def _start(store, job, described_by):
    return store_start(store, job.id, "gpu1", "gpu1-slot0", "l w", T0, 0, described_by)


def test_a_version_is_stored_once_and_read_by_its_name(database, catalog):
    first = _version(catalog, '{"a":1}')
    assert _version(catalog, '{"a":2}') != first == _version(catalog, '{"a":1}')
    assert server_descriptions.read_description(database, first) == '{"a":1}'
    assert server_descriptions.read_description(database, "none") is None


def test_the_overrides_of_a_model_and_their_version_are_stored_together(catalog):
    version = _version(catalog, "{}", preset="x", max_retries=3)
    model = catalog.read().models["zimg"]
    assert (model.overrides, model.described_by) == ({"preset": "x", "max_retries": 3}, version)
    assert (model.config.preset, model.config.max_retries) == ("x", 3)
    assert catalog.configure("zimg", {}, T0).described_by is None


def test_a_registration_keeps_its_description_until_its_overrides_are_removed(catalog):
    of_model = _version(catalog, '{"a":1}')
    registered = ("zimg", "gpu1", "http://gpu1/", 1, T0)
    catalog.register(*registered, overrides={"preset": "x"}, description='{"a":2}')
    own = server_descriptions.hash_body('{"a":2}')
    assert catalog.read().find_description("gpu1", "zimg") == own
    catalog.register(*registered)
    assert catalog.read().find_description("gpu1", "zimg") == own, "an omitted description is kept"
    catalog.register(*registered, overrides={})
    assert catalog.read().find_description("gpu1", "zimg") == of_model
    assert catalog.read().find_description("gpu2", "zimg") == of_model
    assert catalog.read().find_description("gpu1", "other") is None


@pytest.mark.parametrize("why", [Reason.LEASE_EXPIRED, Reason.HANDED_BACK])
def test_a_run_that_was_sent_keeps_its_version_and_one_that_was_not_takes_the_new(store, why):
    sent, unsent = a_queued_job(store), a_queued_job(store)
    for job in (sent, unsent):
        assert _start(store, job, "v1").described_by == "v1"
    store_remote_id(store, sent.id, 1, "r", T0)
    for job in (sent, unsent):
        assert store_end(store, job.id, 1, why, T0).to is State.QUEUED
    assert [_start(store, job, "v2").described_by for job in (sent, unsent)] == ["v1", "v2"]
    assert store.get(sent.id).described_by == "v1"


def test_a_run_elsewhere_takes_the_new_version(store):
    job = a_queued_job(store)
    _start(store, job, "v1")
    store_remote_id(store, job.id, 1, "r", T0)
    store_end(store, job.id, 1, Reason.LEASE_EXPIRED, T0)
    run = store_start(store, job.id, "gpu2", "gpu2-slot0", "l w", T0, 0, None)
    assert (run.remote_id, run.described_by) == (None, None)


def test_a_run_that_the_server_has_lost_names_no_version_any_more(store):
    job = a_queued_job(store)
    _start(store, job, "v1")
    store_remote_id(store, job.id, 1, "r", T0)
    store_end(store, job.id, 1, Reason.SERVER_LOST, T0)
    assert store.get(job.id).described_by is None


def test_versions_that_nothing_names_are_removed_after_a_while_and_no_others(database, store, catalog):
    running, queued, idle, back = (_version(catalog, f'{{"n":{n}}}') for n in range(4))
    now = _version(catalog, '{"n":9}')
    jobs = [a_queued_job(store), a_queued_job(store)]
    for job, version in zip(jobs, (running, queued), strict=True):
        _start(store, job, version)
        store_remote_id(store, job.id, 1, "r", T0)
    store_end(store, jobs[1].id, 1, Reason.LEASE_EXPIRED, T0)
    assert server_descriptions.delete_unused(database, T0) == 0
    _version(catalog, '{"n":3}')
    _version(catalog, '{"n":9}')
    assert server_descriptions.delete_unused(database, T0 + KEEP_UNUSED_MS - 1) == 0
    assert server_descriptions.delete_unused(database, T0 + KEEP_UNUSED_MS) == 1
    there = {
        version
        for version in (running, queued, idle, back, now)
        if server_descriptions.read_description(database, version)
    }
    assert there == {running, queued, back, now}
    for job in jobs:
        store_end(store, job.id, 1, Reason.FINISHED, T0, result="1")
    assert server_descriptions.delete_unused(database, T0 + 4 * KEEP_UNUSED_MS) == 1, (
        "that which was named again counts anew"
    )


def test_the_same_version_stored_at_once_is_one(database, catalog):
    at_once(*[lambda n=n: catalog.configure(f"m{n}", {}, T0, '{"same":1}') for n in range(4)])
    assert server_descriptions.read_description(database, server_descriptions.hash_body('{"same":1}')) == '{"same":1}'


def test_secrets_are_part_of_the_catalog(catalog):
    before = catalog.get_version()
    secret = Secret("KEY", frozenset({"b", "a"}), "sealed", "acme", T0)
    catalog.set_secret(secret)
    assert catalog.read().secrets == {"KEY": secret} and catalog.get_version() > before
    other = Secret("KEY", None, "sealed anew", None, LATER)
    catalog.set_secret(other)
    assert catalog.read().secrets == {"KEY": other}
    assert not catalog.reseal_secret(secret, "x") and catalog.reseal_secret(other, "sealed again")
    assert catalog.read().secrets["KEY"].sealed == "sealed again"
    catalog.remove_secret("KEY")
    assert catalog.read().secrets == {}
    with pytest.raises(NotFound):
        catalog.remove_secret("KEY")
