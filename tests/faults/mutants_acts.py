"""Guards of acts: who asks for a change is noted, once, and only if it is made."""

from tests.faults.mutant import Mutant

NOTED = "tests/contracts/test_routing_dispatcher.py::test_who_cancels_or_retries_a_job_is_noted_once"
STILL = "tests/contracts/test_routing_dispatcher.py::test_the_whole_way_of_a_job"

ACTS = [
    Mutant(
        "who cancels a job that runs is not noted",
        "audit",
        "routing/dispatch/dispatcher.py",
        "self.store.request_cancel(job_id, now, canceling.write):",
        "self.store.request_cancel(job_id, now):",
        (NOTED,),
        still=STILL,
    ),
    Mutant(
        "who retries a dead job is not noted",
        "audit",
        "routing/dispatch/dispatcher.py",
        ', acts.make_entry("job.retry", job_id=job_id, now_ms=now).write)',
        ")",
        (NOTED,),
        still=STILL,
    ),
    Mutant(
        "a cancel is noted again each time that it is asked for",
        "audit",
        "slotkeeper/jobs/store.py",
        "            if row is not None and row.cancel_requested_ms == now_ms:",
        "            if row is not None:",
        (NOTED,),
        still=STILL,
    ),
]
