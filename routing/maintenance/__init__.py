"""Repair what was missed or lost, end what is over, and check the invariants."""
