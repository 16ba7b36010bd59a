"""Who did what: written in the transaction of the change, never changed afterwards, searched and exported."""
