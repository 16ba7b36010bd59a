"""What every preset must be."""

import pytest

from tasks.servers import DEFAULT, Description, compile_plan, presets


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_is_a_description_that_can_be_compiled(name):
    compile_plan(Description.model_validate(presets.get(name)))


def test_the_slot_protocol_is_what_descriptions_default_to():
    assert Description.model_validate(presets.get("slot-protocol")) == DEFAULT


def test_a_name_that_is_none_is_a_key_error():
    with pytest.raises(KeyError):
        presets.get("no-such-server")
