"""Each audit entry names the actor and the act, is stored with the change that it describes, and never changes."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from slotkeeper import audit
from slotkeeper.audit import Actor, AuditFilter
from slotkeeper.db import Database
from slotkeeper.errors import Conflict, DatabaseUnavailable, NotFound
from slotkeeper.jobs.states import State
from slotkeeper.outbox import retention
from slotkeeper.outbox.retention import EventRetention
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.catalog_removal import remove_server
from slotkeeper.registry.identity import Tenant
from slotkeeper.registry.server_descriptions import Secret
from slotkeeper.registry.tenants import Tenants
from slotkeeper.registry.webhook_rotations import SecretRotations
from tests.support.builders import SECOND, T0, a_queued_job, a_running_job, an_ended_job

_EVER = 1 << 60
EVE = Actor("eve", "REST", "10.0.0.7")


def _words(database, **wanted):
    return [done.act for done in audit.find_entries(database, AuditFilter(**wanted))][::-1]


def _note(word, job):
    return audit.make_entry(word, job_id=job.id, now_ms=T0).write


def test_each_act_of_an_operator_is_one_entry_with_its_actor_origin_and_interface(database, store):
    catalog, tenants = Catalog(database), Tenants(database)
    with audit.acting_as(EVE):
        catalog.register("zimg", "gpu1", "http://gpu1/run", 2, T0)
        catalog.set_server_state("gpu1", "draining", reason="new disk", by="eve", now_ms=T0)
        catalog.set_model_state("zimg", "paused", now_ms=T0)
        catalog.set_tenant_state("acme", "frozen", now_ms=T0)
        catalog.configure("zimg", {"max_retries": 5}, T0)
        catalog.set_secret(Secret("HF", None, "sealed", "eve", T0))
        catalog.remove_secret("HF")
        remove_server(database, "gpu1", T0, "eve")
        tenants.add(Tenant("acme"), T0)
        SecretRotations(database).rotate("acme", T0)
        tenants.remove("acme")
    assert _words(database) == [
        "server.register",
        "server.drain",
        "model.pause",
        "tenant.freeze",
        "model.configure",
        "secret.set",
        "secret.remove",
        "server.remove",
        "tenant.add",
        "webhook_secret.rotate",
        "tenant.remove",
    ]
    found = audit.find_entries(database, AuditFilter())
    assert {(entry.actor, entry.interface, entry.origin) for entry in found} == {("eve", "REST", "10.0.0.7")}
    (drained,) = audit.find_entries(database, AuditFilter(act="server.drain"))
    assert (drained.server, drained.reason, drained.at_ms) == ("gpu1", "new disk", T0)
    (configured,) = audit.find_entries(database, AuditFilter(act="model.configure"))
    assert (configured.model, configured.data) == ("zimg", {"overrides": {"max_retries": 5}, "described": False})


def test_each_cancel_and_retry_of_a_job_is_audited_beside_the_events_of_the_job(database, store):
    waiting, running, dead = a_queued_job(store), a_running_job(store).job, an_ended_job(store, State.DEAD)
    with audit.acting_as(EVE):
        store.cancel_waiting(waiting.id, T0, write_audit=_note("job.cancel", waiting))
        store.request_cancel(running.id, T0, _note("job.cancel", running))
        store.request_cancel(running.id, T0 + SECOND, _note("job.cancel", running))  # The cancel is requested already.
        store.revive(dead.id, T0, _note("job.retry", dead))
    assert [_words(database, job_id=job.id) for job in (waiting, running, dead)] == [
        ["job.cancel"],
        ["job.cancel"],
        ["job.retry"],
    ]
    assert {(entry.model, entry.tenant) for entry in audit.find_entries(database, AuditFilter())} == {
        ("zimg", "default")
    }
    assert [event.type for event in store.list_events(waiting.id)] == ["job.enqueued", "job.canceled"]


def test_an_act_that_is_refused_or_finds_no_object_writes_no_audit_entry(database, store):
    job = an_ended_job(store)
    with audit.acting_as(EVE):
        assert not store.request_cancel(job.id, T0, _note("job.cancel", job))
        assert store.cancel_waiting(job.id, T0, write_audit=_note("job.cancel", job)) is None
        assert store.revive(job.id, T0, _note("job.retry", job)) is None
        with pytest.raises(NotFound):
            remove_server(database, "gpu1", T0, "eve")
        with pytest.raises(NotFound):
            Catalog(database).set_model_state("none", "paused")
        with pytest.raises(NotFound):
            Catalog(database).remove_secret("none")
    assert _words(database) == []


def test_a_refusal_that_a_unit_returns_writes_no_entry(database):
    entry = audit.make_entry("model.keep", model="zimg")
    with pytest.raises(Conflict):
        audit.commit_audited(database, entry, lambda _tx: Conflict("no"))
    assert _words(database) == []
    assert audit.commit_audited(database, entry, lambda _tx: True)
    assert _words(database) == ["model.keep"]


def test_no_audit_entry_contains_a_secret(database):
    key = Tenants(database).add(Tenant("acme"), T0).key
    Catalog(database).set_secret(Secret("HF", None, "sealed-text", None, T0))
    for done in audit.find_entries(database, AuditFilter()):
        assert key not in repr(done)
        assert "sealed-text" not in repr(done)


def test_acts_are_found_by_actor_server_model_and_time(database, store):
    catalog = Catalog(database)
    for n, name in enumerate(("eve", "mallory")):
        with audit.acting_as(Actor(name, "REST")):
            catalog.register("zimg", f"gpu{n}", "http://gpu/run", 1, T0 + n * SECOND)
    assert [entry.actor for entry in audit.find_entries(database, AuditFilter(server="gpu1"))] == ["mallory"]
    assert [entry.server for entry in audit.find_entries(database, AuditFilter(actor="eve"))] == ["gpu0"]
    assert [entry.server for entry in audit.find_entries(database, AuditFilter(model="zimg", since_ms=T0 + 1))] == [
        "gpu1"
    ]
    assert [entry.server for entry in audit.find_entries(database, AuditFilter(until_ms=T0 + SECOND))] == ["gpu0"]
    newest, oldest = audit.find_entries(database, AuditFilter())
    assert audit.find_entries(database, AuditFilter(), before=newest.id) == [oldest]


@pytest.mark.parametrize("statement", ["UPDATE events SET actor = 'nobody'", "DELETE FROM events"])
def test_the_database_refuses_to_change_or_delete_an_audit_entry(database, store, statement):
    a_queued_job(store)
    with audit.acting_as(EVE):
        Catalog(database).register("zimg", "gpu1", "http://gpu1/run", 2, T0)
    with pytest.raises((DBAPIError, DatabaseUnavailable), match="acts are not"):
        database.write(lambda tx: tx.connection.execute(text(statement)))
    assert _words(database) == ["server.register"]


@pytest.mark.postgres
def test_the_database_refuses_to_empty_the_events(postgres_url):
    database = Database(postgres_url)
    with pytest.raises((DBAPIError, DatabaseUnavailable), match="acts are not"):
        database.write(lambda tx: tx.connection.execute(text("TRUNCATE events")))
    database.close()


def test_old_acts_and_old_events_of_deleted_jobs_are_removed(database, store):
    job, kept = an_ended_job(store, State.DEAD), a_queued_job(store)
    with audit.acting_as(EVE):
        Catalog(database).register("zimg", "gpu1", "http://gpu1/run", 2, T0)
    retention.delete_ended_jobs(store.database, T0 + SECOND)
    ageing = EventRetention(database)
    assert ageing.delete_next(T0, T0, _EVER) is None  # too young
    assert ageing.delete_next(T0 + SECOND, 0, _EVER) == 3  # the job's trail; acts are kept for longer
    assert store.list_events(job.id) == []
    assert len(store.list_events(kept.id)) == 1
    assert _words(database) == ["server.register"]
    assert (
        ageing.delete_next(T0 + SECOND, T0 + SECOND, _EVER) is None
    )  # The end: the next call starts from the beginning.
    assert ageing.delete_next(T0 + SECOND, T0 + SECOND, _EVER) == 1
    assert _words(database) == []


def test_events_that_a_sink_has_not_received_are_not_removed(database, store):
    job = an_ended_job(store, State.DEAD)
    retention.delete_ended_jobs(store.database, T0 + SECOND)
    last = store.list_events(job.id)[1].id
    assert EventRetention(database).delete_next(T0 + SECOND, 0, last) == 2
    assert [event.type for event in store.list_events(job.id)] == ["job.dlq"]


def test_events_are_removed_slice_by_slice(database, store):
    for _ in range(3):
        an_ended_job(store)
    retention.delete_ended_jobs(store.database, T0 + SECOND)
    ageing, removed = EventRetention(database), []
    while (gone := ageing.delete_next(T0 + SECOND, 0, _EVER, limit=4)) is not None:
        removed.append(gone)
    assert sum(removed) == 9
    assert max(removed) <= 4
