"""A process that reads only the changes has the same catalog as one that reads the whole catalog."""

from dataclasses import replace

import pytest
from sqlalchemy import text

from slotkeeper.db import Database
from slotkeeper.registry import catalog_changes, catalog_removal
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.model_config import INSTALLATION
from slotkeeper.registry.server_descriptions import Secret
from slotkeeper.registry.snapshot import CatalogSnapshot
from tests.support.builders import T0

URL = "http://10.0.0.1:8000/generate"


@pytest.fixture
def catalog(database: Database) -> Catalog:
    catalog = Catalog(database)
    for n in range(3):
        catalog.register("zimg", f"gpu{n}", URL, 4, T0)
    catalog.register("other", "gpu2", URL, None, T0, of_model={"version": 2})
    return catalog


CHANGES = {
    "a server is added": lambda catalog: catalog.register("zimg", "gpu9", URL, 1, T0),
    "a server gets a new model": lambda catalog: catalog.register("third", "gpu1", URL, None, T0),
    "a server is paused": lambda catalog: catalog.set_server_state("gpu1", "paused", reason="why", by="me"),
    "a server is removed": lambda catalog: catalog_removal.remove_server(catalog.database, "gpu1", T0, ""),
    "a model is configured": lambda catalog: catalog.configure("zimg", {"max_retries": 7}, T0),
    "a model is paused": lambda catalog: catalog.set_model_state("zimg", "paused"),
    "a model is removed": lambda catalog: catalog_removal.remove_model(catalog.database, "other", T0, ""),
    "a tenant is paused": lambda catalog: catalog.set_tenant_state("acme", "paused"),
    "the defaults change": lambda catalog: catalog.set_defaults(INSTALLATION, {"max_retries": 9}, T0, "me"),
    "a secret is set": lambda catalog: catalog.set_secret(Secret("token", frozenset({"other"}), "sealed", "me", T0)),
    "a secret is removed": lambda catalog: catalog.remove_secret("token"),
    "a removed model is registered again": lambda catalog: catalog.register("other", "gpu7", URL, 1, T0),
    "a tenant is resumed": lambda catalog: catalog.set_tenant_state("acme", "online"),
    "a server is removed that served two": lambda catalog: catalog_removal.remove_server(
        catalog.database, "gpu2", T0, ""
    ),
}


def _content(snapshot: CatalogSnapshot) -> CatalogSnapshot:
    return replace(snapshot, mark=None)  # of one of the version's rows


def test_each_change_reaches_a_process_that_reads_only_the_changes(catalog: Catalog) -> None:
    former = catalog.read()
    for what, change in CHANGES.items():
        if what == "a model is removed":
            catalog.set_secret(Secret("token", frozenset({"other", "zimg"}), "sealed", "me", T0))
        change(catalog)
        former, whole = catalog.read_after(former), catalog.read()
        assert _content(former) == _content(whole), what


def test_several_changes_reach_a_process_that_reads_them_at_once(catalog: Catalog) -> None:
    former = catalog.read()
    for what, change in CHANGES.items():
        if what not in ("the defaults change", "a secret is removed"):
            change(catalog)
    assert _content(catalog.read_after(former)) == _content(catalog.read())


def test_after_a_change_of_one_server_only_that_server_is_read(catalog: Catalog) -> None:
    former = catalog.read()
    catalog.set_server_state("gpu1", "paused")
    after = catalog.read_after(former)
    assert after.servers["gpu1"].state == "paused" and after.models is former.models
    kept = {name for name in former.servers if former.servers[name] is after.servers[name]}
    assert kept == {"gpu0", "gpu2"}


def test_after_a_version_that_is_missing_in_the_log_the_whole_catalog_is_read(catalog: Catalog) -> None:
    """A process of the previous release writes no log entries."""
    former = catalog.read()
    with catalog.database.engine.begin() as connection:
        connection.execute(text("UPDATE servers SET state = 'paused' WHERE name = 'gpu1'"))
        connection.execute(text("UPDATE counters SET value = value + 1 WHERE name = 'catalog_version'"))
    catalog.set_server_state("gpu0", "frozen")
    assert {name: server.state for name, server in catalog.read_after(former).servers.items()} == {
        "gpu0": "frozen",
        "gpu1": "paused",
        "gpu2": "online",
    }


def test_after_a_restore_the_whole_catalog_is_read(catalog: Catalog) -> None:
    """Versions after the restore reuse the numbers of lost versions."""
    backup = catalog.read().version
    catalog.set_server_state("gpu1", "paused")
    former = catalog.read()
    with catalog.database.engine.begin() as connection:
        connection.execute(text("UPDATE servers SET state = 'online'"))
        connection.execute(text(f"DELETE FROM catalog_changes WHERE version > {backup}"))
        connection.execute(text(f"UPDATE counters SET value = {backup} WHERE name = 'catalog_version'"))
    catalog.set_server_state("gpu0", "frozen")
    catalog.set_server_state("gpu2", "frozen")
    after = catalog.read_after(former)
    assert {name: server.state for name, server in after.servers.items()} == {
        "gpu0": "frozen",
        "gpu1": "online",
        "gpu2": "frozen",
    }


def test_the_log_keeps_the_newest_versions(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_changes, "_KEPT_VERSIONS", 3)
    former = catalog.read()
    for n in range(5):
        catalog.set_server_state("gpu1", "paused", reason=str(n))
    with catalog.database.read() as connection:
        logged = connection.execute(text("SELECT version FROM catalog_changes ORDER BY version")).scalars().all()
    assert logged == [former.version + n for n in (3, 4, 5)]
    assert catalog.read_after(former).servers["gpu1"].reason == "4"
