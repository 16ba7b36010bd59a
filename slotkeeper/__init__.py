"""foundation: what every room stands on.

    errors       broken promises and refusals, each with a code     config   where the record is, how long it may take
    clock        one time for all processes                         exact    JSON with whole numbers of any length
    home         private folders                                    once     what is made once in a process
    logs         log lines
    traces       which trace a job is in, and the names of its spans
    large_json   values that are kept as their text
    garbage      how often it is collected                          unique   text that nobody else makes
    addresses    in URLs, read as a socket reads them, and masked
    lifetimes    whose end is proved, as only the kernel can        crash    points between two effects, at which
                                                                             tests kill the process

It knows no job, no database and no Redis.
"""
