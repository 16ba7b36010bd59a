"""app.api: the REST interface.  Each module is one heading of the document at /openapi.json.

To add a view: write it in the module of its heading, describe its answers in app.schemas, and
tests/house/test_openapi.py says what is missing.  A view parses, calls one use case, and answers.
"""
