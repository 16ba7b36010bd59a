"""The catalog stores models, configurations, servers and tenants."""

import orjson
import pytest
from pydantic import ValidationError
from sqlalchemy import event, update
from structlog.testing import capture_logs

from slotkeeper.clock import Clock
from slotkeeper.db import Database
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.jobs.states import ACTIVE_STATES, FINAL_STATES, Reason, State
from slotkeeper.jobs.values import Quarantine
from slotkeeper.registry import catalog_removal
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.identity import Tenant
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.tables import models
from slotkeeper.registry.tenant_limits import TenantLimits
from slotkeeper.registry.tenants import Tenants
from slotkeeper.registry.values import AdminState, TenantState
from tests.support.builders import SECOND, T0, a_job_in, a_queued_job, a_running_job, at_once
from tests.support.ends import store_end
from tests.support.keys import identity_of

URL = "http://10.0.0.1:8000/generate"


@pytest.fixture
def catalog(database: Database) -> Catalog:
    return Catalog(database)


@pytest.fixture
def tenants(database: Database) -> Tenants:
    return Tenants(database)


def remove(catalog: Catalog, server: str) -> None:
    catalog_removal.remove_server(catalog.database, server, T0, "", force=True)


# -- servers ---------------------------------------------------------------------------------------------------


def _slots(snapshot: CatalogSnapshot, model: str) -> int:
    return sum(server.slots for server in snapshot.servers_for(model))


def test_a_registered_server_is_listed_in_the_catalog_with_its_model(catalog):
    answer = catalog.register("zimg", "gpu1", URL, 4, T0)
    snapshot = catalog.read()
    assert snapshot.servers == {"gpu1": answer}
    assert (answer.fleet, answer.slots, answer.state, answer.endpoints) == ("zimg", 4, "online", {"zimg": URL})
    assert snapshot.models["zimg"].config == ModelConfig()
    assert snapshot.fleets() == ["zimg"]


def test_registering_again_changes_slots_and_endpoint_and_nothing_else(catalog):
    catalog.register("zimg", "gpu1", URL, 4, T0)
    catalog.set_server_state("gpu1", "paused")
    answer = catalog.register("zimg", "gpu1", "http://10.0.0.1:9000/v2", 2, T0 + SECOND)
    assert (answer.slots, answer.endpoints) == (2, {"zimg": "http://10.0.0.1:9000/v2"})
    assert (answer.state, answer.created_ms) == ("paused", T0)
    assert catalog.read().servers == {"gpu1": answer}


def test_a_server_may_serve_several_models_of_one_fleet(catalog):
    catalog.register("zimg", "gpu1", URL, 4, T0)
    answer = catalog.register("flux", "gpu1", "http://10.0.0.1:8000/flux", 4, T0)
    snapshot = catalog.read()
    assert answer.fleet == "zimg"
    assert answer.endpoints == {"zimg": URL, "flux": "http://10.0.0.1:8000/flux"}
    assert snapshot.models_of("zimg") == ["flux", "zimg"]
    assert [server.name for server in snapshot.servers_of("zimg")] == ["gpu1"]
    assert (_slots(snapshot, "flux"), _slots(snapshot, "zimg"), _slots(snapshot, "trellis")) == (4, 4, 0)


def test_a_model_may_have_several_servers(catalog):
    for name, slots in (("gpu2", 3), ("gpu1", 2)):
        catalog.register("zimg", name, URL, slots, T0)
    snapshot = catalog.read()
    assert [server.name for server in snapshot.servers_of("zimg")] == ["gpu1", "gpu2"]
    assert _slots(snapshot, "zimg") == 5


def test_a_model_without_a_server_moves_to_the_fleet_of_its_first_server(catalog, store):
    catalog.configure("flux", {}, T0)
    a_job_in(store, sorted(FINAL_STATES)[0], model="flux")  # ended jobs do not keep the model in its fleet
    catalog.register("zimg", "gpu1", URL, 4, T0)
    assert catalog.register("flux", "gpu1", URL, 4, T0).fleet == "zimg"
    assert catalog.read().models["flux"].fleet == "zimg"


def test_fleets_that_both_have_servers_are_not_joined(catalog):
    catalog.register("zimg", "gpu1", URL, 4, T0)
    catalog.register("flux", "gpu2", URL, 4, T0)
    before = catalog.read()
    with pytest.raises(Conflict, match="another name"):
        catalog.register("flux", "gpu1", URL, 4, T0)
    assert catalog.read() == before


@pytest.mark.parametrize("state", sorted(ACTIVE_STATES))
def test_a_model_whose_jobs_have_not_ended_does_not_change_its_fleet(catalog, store, state):
    """Its jobs wait under the keys of the old fleet, where no worker would look for them."""
    catalog.configure("flux", {}, T0)
    a_job_in(store, state, model="flux")
    catalog.register("zimg", "gpu2", URL, 4, T0)
    before = catalog.read()
    with pytest.raises(Conflict):
        catalog.register("flux", "gpu2", URL, 4, T0)
    assert catalog.read() == before


def test_slot_1_a_server_that_was_removed_is_no_other_fleets_while_it_runs(catalog, store):
    catalog.register("zimg", "gpu1", URL, 1, T0)
    a_job_in(store, State.RUNNING, model="zimg")
    remove(catalog, "gpu1")
    with pytest.raises(Conflict, match="1 run there, and 0 of its slots are quarantined"):
        catalog.register("flux", "gpu1", URL, 1, T0)
    assert catalog.register("zimg", "gpu1", URL, 1, T0).fleet == "zimg"


@pytest.mark.parametrize("model", ["flux", "trellis"])
def test_slot_1_a_removed_server_is_no_other_fleets_while_its_slots_are_quarantined(catalog, store, model):
    """Its slots are held in the queue of the fleet that the job belongs to, and would be free in the other's."""
    catalog.register("flux", "gpu2", URL, 1, T0)
    catalog.register("zimg", "gpu1", URL, 1, T0)
    run = a_running_job(store, model="zimg", server="gpu1")
    store_end(store, run.job.id, run.attempt, Reason.FINISHED, T0, result="{}", quarantine=Quarantine("x", T0))
    remove(catalog, "gpu1")
    with pytest.raises(Conflict, match="0 run there, and 1 of its slots are quarantined"):
        catalog.register(model, "gpu1", URL, 1, T0)
    assert catalog.register("zimg", "gpu1", URL, 1, T0).fleet == "zimg"


def test_a_database_has_a_stable_id(catalog, database):
    found = catalog.read().database_id
    assert found and Catalog(database).read().database_id == found == catalog.get_database_id()


@pytest.mark.parametrize("state", sorted(set(AdminState) - {AdminState.ONLINE}))
def test_slots_of_a_server_that_takes_nothing_new_do_not_count(catalog, state):
    catalog.register("zimg", "gpu1", URL, 4, T0)
    catalog.register("zimg", "gpu2", URL, 2, T0)
    catalog.set_server_state("gpu1", state)
    assert catalog.read().servers["gpu1"].state == state
    assert _slots(catalog.read(), "zimg") == 2
    catalog.set_server_state("gpu1", "online")
    assert _slots(catalog.read(), "zimg") == 6


def test_the_removal_of_a_server_keeps_its_models_and_their_jobs(catalog, store):
    catalog.register("zimg", "gpu1", URL, 4, T0)
    job = a_queued_job(store, model="zimg")
    remove(catalog, "gpu1")
    snapshot = catalog.read()
    assert (snapshot.servers, list(snapshot.models), _slots(snapshot, "zimg")) == ({}, ["zimg"], 0)
    assert store.get(job.id).state == "queued"
    assert catalog.register("zimg", "gpu1", URL, 1, T0).endpoints == {"zimg": URL}


def test_an_operation_on_an_unknown_server_raises_not_found(catalog):
    with pytest.raises(NotFound):
        catalog.set_server_state("gpu1", "paused")
    with pytest.raises(NotFound):
        remove(catalog, "gpu1")


def test_servers_that_register_a_new_model_from_many_sides_at_once_are_all_in(database, catalog):
    sides = [Catalog(Database(database.url)) for _ in range(3)]
    names = [f"gpu{n}" for n in range(3)]
    act = [lambda s=s, n=n: s.register("zimg", n, URL, 2, T0) for s, n in zip(sides, names, strict=True)]
    assert [getattr(answer, "name", repr(answer)) for answer in at_once(*act)] == names
    assert sorted(catalog.read().servers) == names
    assert catalog.get_version() == 3
    for side in sides:
        side.database.close()


def test_the_declaration_of_a_server_is_kept_until_the_server_declares_another(catalog):
    declared = {"gpu": "A100", "memory": 80, "speed": 1.5, "ort": "Zürich, 東京"}
    answer = catalog.register("zimg", "gpu1", URL, 4, T0, declared, 2.5)
    assert (answer.attributes, answer.weight) == (declared, 2.5)
    assert catalog.register("zimg", "gpu1", URL, 4, T0) == answer
    assert catalog.read().servers == {"gpu1": answer}
    answer = catalog.register("zimg", "gpu1", URL, 4, T0, {}, 0.5)
    assert (answer.attributes, answer.weight) == ({}, 0.5)
    assert catalog.read().servers == {"gpu1": answer}


def test_attributes_of_one_model_are_stored_beside_the_attributes_of_its_server(catalog):
    catalog.register("zimg", "gpu1", URL, 4, T0, {"gpu": "A100"}, of_model={"model_version": "2.1", "runtime": "trt"})
    catalog.register("flux", "gpu1", URL, 4, T0, of_model={"model_version": "dev"})
    answer = catalog.register("zimg", "gpu1", URL, 4, T0, {"gpu": "H100"}, of_model={"model_version": "2.2"})
    assert answer.attributes == {
        "gpu": "H100",
        "zimg:model_version": "2.2",
        "zimg:runtime": "trt",
        "flux:model_version": "dev",
    }
    assert catalog.register("zimg", "gpu1", URL, 4, T0, of_model={}).attributes == answer.attributes
    assert catalog.read().servers["gpu1"].attributes == answer.attributes


def test_models_that_are_declared_from_many_sides_at_once_are_all_in(database, catalog):
    catalog.register("m0", "gpu1", URL, 4, T0)
    sides = [Catalog(Database(database.url)) for _ in range(3)]
    act = [
        lambda s=s, n=n: s.register(f"m{n}", "gpu1", URL, 4, T0, of_model={"model_version": str(n)})
        for n, s in enumerate(sides)
    ]
    at_once(*act)
    assert catalog.read().servers["gpu1"].attributes == {f"m{n}:model_version": str(n) for n in range(3)}
    for side in sides:
        side.database.close()


def test_a_server_that_declares_nothing_is_as_any_other(catalog):
    answer = catalog.register("zimg", "gpu1", URL, 4, T0)
    assert (answer.attributes, answer.weight, answer.reason, answer.changed_by, answer.changed_ms) == (
        {},
        1.0,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"attributes": {"gpu": True}},
        {"attributes": {"memory": float("nan")}},
        {"attributes": {"memory": float("inf")}},
        {"attributes": {"gpu": None}},
        {"attributes": {"gpu": ["A100"]}},
        {"attributes": {"gpu": "half a \ud83d pair"}},
        {"attributes": {"memory": 1 << 64}},
        {"attributes": {7: "A100"}},
        {"weight": 0},
        {"weight": -1},
        {"weight": 1001},
        {"weight": float("nan")},
        {"weight": True},
    ],
)
def test_an_invalid_declaration_of_a_server_changes_nothing(catalog, wrong):
    catalog.register("zimg", "gpu1", URL, 4, T0)
    before = catalog.read()
    with pytest.raises(ValueError, match="give a"):
        catalog.register("zimg", "gpu1", URL, 1, T0, **wrong)
    assert catalog.read() == before


# -- who takes part --------------------------------------------------------------------------------------------


def _stood(catalog: Catalog, kind: str, name: str):
    """How something stands: (state, reason, by whom, when); a tenant that is not listed stands online."""
    found = getattr(catalog.read(), f"{kind}s").get(name, TenantState(name, "online"))
    return found.state, found.reason, found.changed_by, found.changed_ms


@pytest.mark.parametrize("kind", ["server", "model", "tenant"])
@pytest.mark.parametrize("state", sorted(AdminState))
def test_the_catalog_stores_the_state_of_a_server_model_or_tenant_and_the_operator_who_set_it(catalog, kind, state):
    name = {"server": "gpu1", "model": "zimg", "tenant": "acme"}[kind]
    change = getattr(catalog, f"set_{kind}_state")
    catalog.register("zimg", "gpu1", URL, 4, T0)
    assert _stood(catalog, kind, name) == ("online", None, None, None)
    change(name, "paused", reason="smells of smoke", by="ann", now_ms=T0)
    assert _stood(catalog, kind, name) == ("paused", "smells of smoke", "ann", T0)
    change(name, state, by="bob", now_ms=T0 + SECOND)
    known = (None, None, None) if (kind, state) == ("tenant", "online") else (None, "bob", T0 + SECOND)
    assert _stood(catalog, kind, name) == (state, *known)


def test_the_catalog_lists_only_tenants_that_are_not_online_with_or_without_a_key(catalog, tenants):
    tenants.add(Tenant("keyed"), T0)
    for name in ("keyed", "keyless", "quiet"):
        catalog.set_tenant_state(name, "frozen", now_ms=T0)
    catalog.set_tenant_state("quiet", "online", now_ms=T0)
    assert catalog.read().tenants == {
        name: TenantState(name, "frozen", None, None, T0) for name in ("keyed", "keyless")
    }


def test_a_server_keeps_its_state_when_it_registers_again_and_a_model_when_it_is_reconfigured(catalog):
    catalog.register("zimg", "gpu1", URL, 4, T0)
    catalog.set_server_state("gpu1", "paused", reason="heat", by="ann", now_ms=T0)
    catalog.set_model_state("zimg", "frozen", reason="bad weights", by="bob", now_ms=T0)
    answer = catalog.register("zimg", "gpu1", URL, 2, T0 + SECOND)
    assert (answer.state, answer.reason, answer.changed_by, answer.changed_ms) == ("paused", "heat", "ann", T0)
    model = catalog.configure("zimg", {"max_retries": 5}, T0 + SECOND)
    assert (model.state, model.reason, model.changed_by, model.changed_ms) == ("frozen", "bad weights", "bob", T0)
    assert catalog.read().models == {"zimg": model}


@pytest.mark.parametrize("kind", ["server", "model"])
def test_an_unknown_server_or_model_cannot_be_paused(catalog, kind):
    before = catalog.read()
    with pytest.raises(NotFound) as refused:
        getattr(catalog, f"set_{kind}_state")("nobody", "paused", now_ms=T0)
    assert refused.value.facts == {kind: "nobody"}
    assert catalog.read().servers == before.servers


@pytest.mark.parametrize("kind", ["server", "model", "tenant"])
@pytest.mark.parametrize("wrong", ["off", "", "ONLINE"])
def test_an_unknown_state_is_rejected(catalog, kind, wrong):
    catalog.register("gpu1", "gpu1", URL, 4, T0)
    before = catalog.read()
    with pytest.raises(ValueError, match="AdminState"):
        getattr(catalog, f"set_{kind}_state")("gpu1", wrong, now_ms=T0)
    assert catalog.read() == before


@pytest.mark.parametrize("reason", ["x" * 5000, "half a \ud83d pair", "a \x00 byte"])
def test_a_reason_is_stored_whatever_was_written(catalog, reason):
    catalog.set_tenant_state("acme", "paused", reason=reason, by=reason, now_ms=T0)
    stored = catalog.read().tenants["acme"]
    assert stored.reason == stored.changed_by
    assert stored.reason[:2] == reason[:2]
    assert len(stored.reason) <= 500


def test_of_two_concurrent_changes_of_the_state_of_a_tenant_one_is_stored_as_a_whole(database, catalog):
    other = Catalog(Database(database.url))
    for _ in range(5):
        answers = at_once(
            lambda: catalog.set_tenant_state("acme", "paused", by="ann", now_ms=T0),
            lambda: other.set_tenant_state("acme", "frozen", by="bob", now_ms=T0),
        )
        assert answers == [None, None]
        stored = catalog.read().tenants["acme"]
        assert (stored.state, stored.changed_by) in {("paused", "ann"), ("frozen", "bob")}
    other.database.close()


# -- configuration ---------------------------------------------------------------------------------------------


def test_an_override_replaces_the_previous_one_and_an_empty_override_restores_the_defaults(catalog):
    catalog.configure("flux", {"model_type": "async", "poll_interval": 3.0}, T0)
    assert catalog.read().models["flux"].config == ModelConfig(model_type="async", poll_interval=3.0)
    catalog.configure("flux", {"max_retries": 5}, T0)
    model = catalog.read().models["flux"]
    assert (model.overrides, model.config) == ({"max_retries": 5}, ModelConfig(max_retries=5))
    answer = catalog.configure("flux", {}, T0)
    assert answer == catalog.read().models["flux"]
    assert (answer.overrides, answer.config) == ({}, ModelConfig())


def test_configuring_keeps_a_models_fleet_and_creates_an_unknown_one(catalog):
    catalog.register("zimg", "gpu1", URL, 4, T0)
    catalog.register("flux", "gpu1", URL, 4, T0)
    assert catalog.configure("flux", {"max_retries": 5}, T0).fleet == "zimg"
    assert catalog.configure("new", {}, T0).fleet == "new"
    assert catalog.read().fleets() == ["new", "zimg"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_retrys": 5},
        {"max_retries": -1},
        {"poll_interval": 10, "max_poll_time": 5},
        {"poll_endpoint_template": "/status"},
        {"policy": "random"},
    ],
)
def test_an_override_that_is_wrong_changes_nothing(catalog, wrong):
    catalog.configure("flux", {"max_retries": 5}, T0)
    before = catalog.read()
    with pytest.raises(ValidationError):
        catalog.configure("flux", wrong, T0)
    assert catalog.read() == before


def test_fields_that_a_newer_release_stored_are_ignored_and_logged_once(database, catalog):
    catalog.configure("flux", {"max_retries": 5}, T0)
    stored = {"max_retries": 5, "policy": "auction", "gravity": 9.81}
    change = update(models).where(models.c.name == "flux").values(overrides=orjson.dumps(stored).decode())
    database.write(lambda tx: tx.connection.execute(change))
    with capture_logs() as logs:
        found = [catalog.read().models["flux"] for _ in range(3)]
    assert [model.config for model in found] == [ModelConfig(max_retries=5)] * 3
    assert found[0].overrides == stored  # kept for the release that knows these fields
    assert logs == [
        {
            "event": "catalog_overrides_unknown",
            "log_level": "warning",
            "model": "flux",
            "fields": ["gravity", "policy"],
        }
    ]
    with pytest.raises(ValidationError):
        catalog.configure("flux", stored, T0)


# -- the version -----------------------------------------------------------------------------------------------


def test_the_version_grows_with_every_change(catalog):
    seen = [catalog.get_version()]
    for change in (
        lambda: catalog.register("zimg", "gpu1", URL, 4, T0),
        lambda: catalog.register("zimg", "gpu1", URL, 4, T0),
        lambda: catalog.configure("zimg", {"max_retries": 5}, T0),
        lambda: catalog.set_server_state("gpu1", "paused"),
        lambda: catalog.set_model_state("zimg", "paused"),
        lambda: catalog.set_tenant_state("acme", "paused"),
        lambda: catalog.set_tenant_state("acme", "online"),
        lambda: remove(catalog, "gpu1"),
    ):
        change()
        seen.append(catalog.get_version())
        assert catalog.read().version == seen[-1]
    assert seen[0] == 0
    assert seen == sorted(set(seen))


def test_the_version_grows_in_the_transaction_of_the_change(catalog, faults):
    catalog.register("zimg", "gpu1", URL, 4, T0)
    before = catalog.read()
    with faults("INSERT INTO counters"):
        for change in (
            lambda: catalog.register("zimg", "gpu2", URL, 4, T0),
            lambda: catalog.configure("zimg", {"max_retries": 5}, T0),
            lambda: catalog.set_server_state("gpu1", "paused"),
            lambda: catalog.set_model_state("zimg", "paused"),
            lambda: catalog.set_tenant_state("acme", "paused"),
            lambda: remove(catalog, "gpu1"),
        ):
            with pytest.raises(ZeroDivisionError):
                change()
    assert catalog.read() == before


def test_a_change_while_the_catalog_is_read_is_never_hidden_by_its_version(database, catalog):
    """A snapshot may be newer than its version says, and is then read again; never older."""
    catalog.register("zimg", "gpu1", URL, 4, T0)
    other = Catalog(Database(database.url))
    changed: list[bool] = []

    def change(connection: object, cursor: object, statement: str, *_: object) -> None:
        if "FROM models" in statement and not changed:
            changed.append(True)
            other.configure("zimg", {"max_retries": 5}, T0)

    event.listen(database.engine, "before_cursor_execute", change)
    snapshot = catalog.read()
    event.remove(database.engine, "before_cursor_execute", change)
    assert snapshot.models["zimg"].config.max_retries == 5
    assert snapshot.version < catalog.get_version()
    other.database.close()


# -- tenants ---------------------------------------------------------------------------------------------------


def test_a_name_is_taken_once(tenants):
    key = tenants.add(Tenant("acme"), T0).key
    with pytest.raises(Conflict):
        tenants.add(Tenant("acme"), T0, limits=TenantLimits(rate_per_s=5))
    assert identity_of(tenants.database, key).tenant == Tenant("acme")


def test_only_one_of_two_concurrent_additions_of_the_same_tenant_succeeds(database, tenants):
    other = Tenants(Database(database.url))
    for n in range(5):
        tenant = Tenant(f"t{n}")
        answers = at_once(lambda t=tenant: tenants.add(t, T0), lambda t=tenant: other.add(t, T0))
        assert sorted(type(answer) for answer in answers if isinstance(answer, Exception)) == [Conflict]
    assert len(tenants.list_all()) == 5
    other.database.close()


def test_a_removed_tenants_key_stops_working_at_once(tenants):
    key = tenants.add(Tenant("acme"), T0).key
    tenants.remove("acme")
    assert identity_of(tenants.database, key) is None
    with pytest.raises(NotFound):
        tenants.remove("acme")


def test_tenants_are_listed_by_name(tenants):
    for name in ("zoe", "acme"):
        tenants.add(Tenant(name), T0)
    assert [tenant.name for tenant in tenants.list_all()] == ["acme", "zoe"]


def test_a_read_of_the_catalog_version_also_reads_the_time_of_the_database(database, monkeypatch):
    ours = Clock()
    monkeypatch.setattr("slotkeeper.db.shared_clock.clock", ours)
    Catalog(database).get_version()
    if database.engine.dialect.name == "postgresql":
        assert ours._ahead_ms is not None and abs(ours.skew_ms) < 1_000
    else:
        assert ours._ahead_ms is None, "its only clock is this machine's"
