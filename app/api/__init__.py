"""app.api: the REST interface.  Each module is one heading of the document at /openapi.json, or serves it (docs).

`queue` submits, `jobs` and `batches` look and cancel, `streams` and `webhooks` tell what happens, `callback` hears
servers; `servers`, `models`, `defaults`, `presets`, `tenants`, `secrets`, `dlq`, `ledger` and `processes` are for
administrators, `audit` for whoever has that right, `health` and `figures` for whoever watches.

To add a view: write it in the module of its heading, and its answer as a class (app/schemas/base.py) in the module of
answers that it belongs to; tests/house/test_openapi.py says what is missing.  A view parses, calls one use case, and
answers.
"""
