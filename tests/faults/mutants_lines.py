"""Guards of what is seen from outside: lines of logs."""

from tests.faults.mutant import Mutant

_LOGS = "tests/unit/test_logs.py::"
_LINES = "tests/faults/test_lines.py::"
_PLAIN = f"{_LOGS}test_an_event_is_one_line_with_its_facts"
_ENDS = f"{_LINES}test_each_job_that_ends_is_one_line_with_job_tenant_and_trace_whoever_ends_it"

LINES = [
    Mutant(
        "a line of JSON may be of any length",
        "lines are bounded",
        "slotkeeper/logs.py",
        "        if len(line) > MAX_LINE_LENGTH:\n",
        "        if False:\n",
        (f"{_LOGS}test_as_json_a_line_stays_an_object_however_long_or_odd_its_facts",),
        still=_PLAIN,
    ),
    Mutant(
        "what a context was about stays",
        "lines name the right job",
        "slotkeeper/logs.py",
        "    _about.set(facts)\n",
        "    _about.set({**(_about.get() or {}), **facts})\n",
        (f"{_LOGS}test_what_a_context_is_about_stands_in_its_lines_and_no_longer_once_it_is_about_something_else",),
        still=_PLAIN,
    ),
    Mutant(
        "an end is told though somebody else has counted it",
        "one line for each end",
        "routing/queries/job_counters.py",
        "        if not self._database.write(lambda tx: _note(tx, before, after, sums)):\n            return 0\n",
        "        self._database.write(lambda tx: _note(tx, before, after, sums))\n",
        (f"{_LINES}test_an_end_that_somebody_else_has_counted_is_not_told_twice",),
        still=_ENDS,
    ),
]
