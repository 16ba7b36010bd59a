"""Guards of keys, of what is private, and of what comes from outside."""

from tests.faults.mutant import CALLBACK, Mutant

KEYRING = "tests/unit/test_keyring.py::"
WEBHOOK_SECRETS = "tests/contracts/test_webhook_secrets.py::"

SECRETS = [
    # -- keys ------------------------------------------------------------------------------------------------
    Mutant(
        "a callback token is made with the key of webhooks",
        "keys",
        "tasks/keyring.py",
        "    info = orjson.dumps([purpose, *context])\n",
        '    info = b""\n',
        (
            f"{KEYRING}test_no_two_purposes_tenants_or_rotations_share_a_key",
            f"{KEYRING}test_who_can_verify_webhooks_can_make_no_token",
        ),
        still=f"{CALLBACK}test_a_push_ends_the_run_and_hands_the_slot_on",
    ),
    Mutant(
        "all tenants share a webhook secret",
        "keys",
        "tasks/keyring.py",
        "derive(secret, Purpose.WEBHOOK, tenant, str(number))",
        "derive(secret, Purpose.WEBHOOK, str(number))",
        (f"{WEBHOOK_SECRETS}test_a_webhook_is_verified_by_its_tenants_secret_and_by_no_other",),
        still=f"{WEBHOOK_SECRETS}test_a_second_rotation_ends_the_secret_before_the_last_at_once",
    ),
    Mutant(
        "a rotated secret is signed with for ever",
        "keys",
        "jobs/rotations.py",
        "overlaps = self.number > 0 and now < self.former_until_ms",
        "overlaps = self.number > 0",
        (f"{KEYRING}test_a_rotated_secret_overlaps_with_the_one_before_for_a_day_and_no_longer",),
        still=f"{WEBHOOK_SECRETS}test_a_second_rotation_ends_the_secret_before_the_last_at_once",
    ),
    Mutant(
        "a tenant inherits the webhook secret of one that was removed",
        "keys",
        "jobs/tenants.py",
        "            raise_number(tx, name, now=0)  # Another tenant of this name shall not have its secret.\n",
        "",
        (f"{WEBHOOK_SECRETS}test_a_tenant_of_the_same_name_does_not_inherit_the_secret",),
        still=f"{WEBHOOK_SECRETS}test_a_rotation_concerns_one_tenant",
    ),
    Mutant(
        "another secret goes unnoticed",
        "keys",
        "tasks/startup.py",
        "    return known == present.encode()\n",
        "    return True\n",
        (f"{WEBHOOK_SECRETS}test_a_process_with_another_secret_says_so_at_its_start",),
        still=f"{WEBHOOK_SECRETS}test_a_rotation_concerns_one_tenant",
    ),
]
