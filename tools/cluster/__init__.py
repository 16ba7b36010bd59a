"""Start a whole Slotkeeper of real processes, and inject faults into it."""
