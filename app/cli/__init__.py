"""cli: the command line.

`local`, `simulate`, `drill` and `conform` work on this machine; `jobs`, `batches`, `admin`, `defaults`, `presets`,
`webhooks`, `audit` and `secrets` ask the API, `health` this host's processes; `doctor` looks at everything, by
`checkup`.  They share `common`; `standing` pauses and resumes, `removal` removes, `conditions` reads
NAME=VALUE, `results` saves files.
"""
