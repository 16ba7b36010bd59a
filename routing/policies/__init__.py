"""policies: the rules, as pure functions of plain values and `now`.  No Redis, no SQL, no clock of their own."""
