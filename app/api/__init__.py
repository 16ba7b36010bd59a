"""The REST interface: a view parses a request, calls one use case, and returns its result.

CONTRIBUTING.md says how to add an endpoint.
"""
