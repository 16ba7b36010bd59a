"""Start a whole Slotkeeper of real processes, and break it."""
