"""The state of a fleet in Redis: lanes, offers, leases, slots and the capacity of workers."""
