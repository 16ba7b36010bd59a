"""Starts a whole Slotkeeper of real processes, and breaks it."""
