"""app: the door.  Parses, calls, answers; decides nothing."""
