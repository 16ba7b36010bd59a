"""insight: what can be said about the work.  It reads the record and the room, which never read it.

`estimates` says when jobs should start, from `interval` (what is due to chance) and `forecasts` (what was learned);
`places` where one waits, `lanes` who waits for a model, `explain` why a job stands there, `story` why it took as long
as it did, seen from its `neighbours`; `overtaking` for how long others may still come before it; `idle` why a server
gets none, `load` what a model has to do, `invariants` what does not hold.

`history` is what has happened, counted, `tallies` what processes count, `standings` and `depth` how things stand,
`servers` those of a fleet, `processes` who lives; `overview` how models stand side by side, from `last_hour` and
`looks` at many jobs at once; `batches` are jobs that came together; `said` is what servers say of runs meanwhile,
`spans` a job as spans of its trace; `holdings` what a tenant has; `listing` shows jobs page by page, `attempts` each
start of one.
"""
