"""database: how SQL is spoken.

    db           group commit: writes of the same moment share a transaction
    writer       the connection that it writes on           prepared     statements compiled once
    engines, postgresql  how connections are made           connections  how long anything on them takes
    fate         a COMMIT without an answer                 lookout      who waits for something new is woken

It knows no table and no job.
"""
