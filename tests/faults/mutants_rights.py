"""Guards of leases whose time may be over."""

from tests.faults.mutant import Mutant

_RIGHTS = "tests/faults/test_rights.py::"
_STARTS_NOTHING = f"{_RIGHTS}test_a_worker_that_was_stopped_after_its_claim_starts_nothing"
_SENDS_NOTHING = f"{_RIGHTS}test_a_worker_that_was_stopped_after_its_start_sends_nothing"


def _mutant(name: str, file: str, old: str, new: str, *tests: str, still: str = _STARTS_NOTHING) -> Mutant:
    return Mutant(name, "SLOT-1", file, old, new, tests, still)


RIGHTS = [
    _mutant(
        "a worker that was stopped after its claim starts the job all the same",
        "tasks/worker/executor.py",
        "            if not await self._rights.holds(watch):\n",
        "            if False:\n",
        _STARTS_NOTHING,
        still=_SENDS_NOTHING,
    ),
    _mutant(
        "a worker that was stopped after its start sends the request all the same",
        "tasks/worker/server_call.py",
        "        if not await self._holds(self._watch):\n            return StopReason.UNSENT\n",
        "        if False:\n            return StopReason.UNSENT\n",
        _SENDS_NOTHING,
        f"{_RIGHTS}test_a_start_that_was_stored_after_its_lease_was_gone_is_put_back_and_costs_nothing",
    ),
    _mutant(
        "a worker that was stopped sends the request again",
        "tasks/worker/server_call.py",
        "        if not await self._holds(self._watch):  # The database",
        "        if False:  # The database",
        f"{_RIGHTS}test_a_worker_that_was_stopped_sends_no_request_again",
    ),
    _mutant(
        "a lease that was lost before its run was sent is written again",
        "tasks/worker/inquiry.py",
        "            if doubted and not watch.sent:",
        "            if False:",
        f"{_RIGHTS}test_a_lost_lease_of_a_run_that_was_not_sent_is_not_written_again",
    ),
    _mutant(
        "a lease beside the slot's holder is used for a first request",
        "routing/lua/hold.lua",
        'if redis.call("HGET", SLOTS, lease.slot) ~= lease.job_id then return "beside" end\n',
        'if false then return "beside" end\n',
        f"{_RIGHTS}test_a_lease_that_came_back_beside_another_is_not_used_for_a_first_request",
    ),
]
