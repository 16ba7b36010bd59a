"""cli: the command line.

`local`, `simulate` and `drill` work on this machine; `jobs`, `admin` and `webhooks` ask the API.
"""
