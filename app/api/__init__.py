"""The REST interface: a view parses a request, calls one use case, and returns its result.

To add an endpoint, write its view in the module of its heading, and its request and response bodies in `app.schemas`.
The tests of the OpenAPI document name the parts that are missing.
"""
