"""Defaults exist for each kind of model and for the installation."""

import pytest

from slotkeeper.db import Database
from slotkeeper.errors import Conflict, InvalidJob, NotFound
from slotkeeper.registry import server_descriptions
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.model_config import INSTALLATION, ConfigSource
from tests.support.builders import T0


@pytest.fixture
def catalog(database: Database) -> Catalog:
    return Catalog(database)


def test_the_most_specific_level_that_sets_a_field_decides_it(catalog):
    catalog.set_defaults(INSTALLATION, {"max_retries": 1, "max_crashes": 1, "policy": "fifo"}, T0, "ops")
    catalog.set_defaults("training", {"max_retries": 2, "max_crashes": 2}, T0, "ops")
    catalog.configure("zimg", {"kind": "training", "max_retries": 3}, T0)
    catalog.configure("flux", {}, T0)
    found = catalog.read().models
    of_kind, plain = found["zimg"], found["flux"]
    assert (of_kind.config.max_retries, of_kind.config.max_crashes, of_kind.config.policy) == (3, 2, "fifo")
    assert (plain.config.max_retries, plain.config.max_crashes, plain.config.policy) == (1, 1, "fifo")
    fields = ("kind", "max_retries", "max_crashes", "policy")
    assert [of_kind.sources[name] for name in fields] == [
        ConfigSource.MODEL,
        ConfigSource.MODEL,
        ConfigSource.KIND,
        ConfigSource.INSTALLATION,
    ]
    assert "poll_interval" not in of_kind.sources, "the built-in default has no source"


def test_a_change_of_defaults_reaches_every_model_and_raises_the_version(catalog):
    catalog.set_defaults("training", {"max_retries": 2}, T0, "ops")
    catalog.configure("zimg", {"kind": "training"}, T0)
    before = catalog.get_version()
    catalog.set_defaults("training", {"max_retries": 9}, T0, "ops")
    assert (catalog.read().models["zimg"].config.max_retries, catalog.get_version()) == (9, before + 1)


def test_a_server_description_is_taken_whole_from_the_most_specific_level_that_sets_it(catalog):
    catalog.set_defaults(INSTALLATION, {"preset": "a"}, T0, "ops", '{"a":1}')
    catalog.set_defaults("training", {"model_type": "async", "id_field": "id"}, T0, "ops", '{"b":1}')
    catalog.configure("own", {"kind": "training", "preset": "c"}, T0, '{"c":1}')
    catalog.configure("of-kind", {"kind": "training"}, T0)
    catalog.configure("plain", {}, T0)
    found = catalog.read().models
    versions = {name: model.described_by for name, model in found.items()}
    assert versions == {
        "own": server_descriptions.hash_body('{"c":1}'),
        "of-kind": server_descriptions.hash_body('{"b":1}'),
        "plain": server_descriptions.hash_body('{"a":1}'),
    }
    assert (found["own"].config.model_type, found["of-kind"].config.id_field, found["of-kind"].config.preset) == (
        "sync",
        "id",
        None,
    )


def test_a_description_that_defaults_name_is_kept(database, catalog):
    catalog.set_defaults(INSTALLATION, {"preset": "a"}, T0, "ops", '{"a":1}')
    for now in (T0, T0 + server_descriptions.KEEP_UNUSED_MS):
        server_descriptions.delete_unused(database, now)
    assert server_descriptions.read_description(database, server_descriptions.hash_body('{"a":1}')) == '{"a":1}'


def test_defaults_that_make_the_configuration_of_a_model_invalid_are_refused_as_a_whole(catalog):
    catalog.configure("zimg", {"poll_interval": 300}, T0)
    before = catalog.read()
    with pytest.raises(InvalidJob, match=r"poll_interval must not exceed max_poll_time.*'zimg'"):
        catalog.set_defaults(INSTALLATION, {"max_poll_time": 60}, T0, "ops")
    assert catalog.read() == before


def test_a_model_that_could_not_be_configured_so_by_its_kind_is_refused(catalog):
    catalog.set_defaults("training", {"max_poll_time": 60}, T0, "ops")
    with pytest.raises(InvalidJob, match="poll_interval"):
        catalog.configure("zimg", {"kind": "training", "poll_interval": 300}, T0)
    with pytest.raises(InvalidJob, match="no kind 'deployment'"):
        catalog.configure("zimg", {"kind": "deployment"}, T0)
    assert catalog.read().models == {}


def test_a_kind_that_models_are_of_is_not_removed(catalog):
    catalog.set_defaults("training", {}, T0, "ops")
    catalog.configure("zimg", {"kind": "training"}, T0)
    with pytest.raises(Conflict, match="1 models are of kind 'training'"):
        catalog.remove_kind("training")
    catalog.configure("zimg", {}, T0)
    catalog.remove_kind("training")
    assert catalog.read().defaults == {}
    with pytest.raises(NotFound):
        catalog.remove_kind("training")
