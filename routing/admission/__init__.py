"""Check a request and apply the limits that must hold before a job is stored."""
