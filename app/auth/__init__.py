"""Finds the tenant of a request and decides what it may do."""
