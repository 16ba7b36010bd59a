"""The use cases (submit, cancel, revive), the steps of a run, and what the end of a run means."""
