"""The REST interface: a view parses a request, calls one use case, and returns its answer.

To add an endpoint: its view in the module of its heading, its request and response bodies in `app.schemas`;
tests/house/test_openapi.py names what is missing.
"""
