"""Guards of admission: what is asked, when, and who is heard."""

from tests.faults.mutant import Mutant

PASSED = "tests/contracts/test_routing_gates.py::"
STILL = f"{PASSED}test_gates_that_need_to_know_nothing_ask_nothing"

GATES = [
    Mutant(
        "a submit that is refused costs a turn of the rate",
        "limits",
        "routing/admission/gates/rate.py",
        "Phase.COUNT",
        "Phase.LOOKS",
        (f"{PASSED}test_a_submit_that_is_refused_costs_no_turn_of_the_rate",),
        still=STILL,
    ),
    Mutant(
        "a gate that needs no answer is heard before those that it stands behind",
        "limits",
        "routing/admission/admission.py",
        "            except _REFUSALS as refusal:\n                return questions, (gate, refusal)\n",
        "            except _REFUSALS:\n                raise\n",
        (f"{PASSED}test_the_first_gate_that_refuses_is_heard_also_where_a_later_one_needs_no_answer",),
        still=STILL,
    ),
    Mutant(
        "each gate asks Redis by itself",
        "limits",
        "routing/admission/admission.py",
        "self._queues.run_all([question.command for _, question in questions])",
        "[self._queues.run_all([question.command])[0] for _, question in questions]",
        (f"{PASSED}test_all_gates_that_look_ask_in_one_round_trip_and_the_rate_in_another",),
        still=STILL,
    ),
]
