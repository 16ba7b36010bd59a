"""Guards of Celery's side: messages from the broker, revokes, and what Celery's clients are told."""

from tests.faults.mutant import MESSAGES, REVOKES, WORKERS, Mutant

CELERY = [
    Mutant(
        "an offer from the wire is the worker's own if it says so",
        "LEASE-4",
        "tasks/messages.py",
        "return Offer(**fields) if right else None",
        'return Offer(**fields, owner=found.get("owner", "")) if right else None',
        (f"{MESSAGES}test_an_offer_from_the_wire_is_open_whatever_it_says_of_its_owner",),
        still=f"{MESSAGES}test_a_wake_up_carries_its_offer",
    ),
    Mutant(
        "a revoked wake-up is dropped",
        "SLOT-2",
        "tasks/inference.py",
        "        return False",
        "        return super().revoked()",
        (f"{REVOKES}test_no_message_of_a_job_is_dropped_as_revoked",),
        still=f"{WORKERS}test_only_a_wake_up_is_acknowledged_before_it_is_done",
    ),
]
