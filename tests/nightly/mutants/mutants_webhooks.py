"""How webhooks are delivered."""

from tests.nightly.mutants.operators import Mutant, always, never, swap

MUTANTS = [
    Mutant(
        "one tenant takes all deliveries of a group",
        "tasks.webhooks.delivery_queue:DeliveryLimits._has_permit",
        swap(
            "self._taken_by_tenant[tenant, group] < MAX_IN_GROUP[group] - self._taken[group]",
            "self._taken[group] < MAX_IN_GROUP[group]",
        ),
        kills=[
            "test_silent_receivers_of_one_tenant_leave_capacity_for_a_new_receiver_of_another",
            "test_silent_receivers_of_many_tenants_leave_capacity_for_a_new_receiver",
            "test_a_tenant_gets_at_most_half_of_the_deliveries_at_once",
        ],
        breaks="HOOK-1",
        still="test_a_receiver_that_was_never_tried_gets_one_try_at_a_time",
    ),
    Mutant(
        "a template may name any value",
        "tasks.webhooks.bodies:validate_template",
        never("not _RESULT_PATH.fullmatch(name)"),
        kills=["test_a_template_with_an_unknown_name_is_refused"],
        breaks="secrets",
        still="test_every_name_that_is_offered_can_be_named",
    ),
    Mutant(
        "a template may repeat a value of any length",
        "tasks.webhooks.bodies:_as_text",
        always("len(text) <= MAX_VALUE_CHARS"),
        kills=["test_the_largest_template_gives_a_body_of_limited_size"],
        breaks="limits",
        still="test_every_name_that_is_offered_can_be_named",
    ),
]
