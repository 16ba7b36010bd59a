"""The library below: errors, clock, settings of storage, logs, private files, and the packages that store jobs."""
