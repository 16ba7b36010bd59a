"""app.api: the REST interface.  Each module is one heading of the document at /openapi.json, or serves it (docs).

`queue` submits, `jobs` looks and cancels, `streams` tells what happens, `callback` hears servers; `servers`, `models`,
`presets`, `tenants`, `secrets`, `dlq` and `ledger` are for administrators, `health` for whoever watches.

To add a view: write it in the module of its heading, describe its answers in app.schemas, and
tests/house/test_openapi.py says what is missing.  A view parses, calls one use case, and answers.
"""
