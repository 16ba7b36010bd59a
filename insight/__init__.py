"""insight: what can be said about the work.  It reads the record and the room, which never read it.

`estimates` says when jobs should start, from `interval` (what is due to chance) and `forecasts` (what was learned);
`places` where one waits, `explain` why it stands there, `idle` why a server gets none, `load` what a model has to do,
`audit` what does not hold.
"""
