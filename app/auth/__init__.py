"""Find the tenant of a request and decide what it may do."""
