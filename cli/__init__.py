"""cli: the command line.

`local`, `simulate`, `drill` and `conform` work on this machine; `jobs`, `admin`, `presets`, `webhooks` and `secrets`
ask the API.  They share `common`; `standing` pauses and resumes, `conditions` reads NAME=VALUE, `flowers_events` is
what Flower hears.
"""
