from slotkeeper.registry.tenants import LOCAL_TENANT, hash_key


def test_a_key_is_kept_as_its_sha_256():
    assert hash_key("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_without_keys_everybody_is_the_default_tenant_and_may_administer():
    assert (LOCAL_TENANT.name, LOCAL_TENANT.admin, LOCAL_TENANT.rate_per_s, LOCAL_TENANT.burst) == (
        "default",
        True,
        None,
        None,
    )
