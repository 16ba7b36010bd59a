"""scripting: how Redis is spoken.

    scripts      Lua files as functions of Redis            signatures   what a script takes and returns
    keys         the names of all keys                      pipeline     Redis from an event loop
    suitability  what Redis must be set to                  full         a client whose writes a full Redis takes

What scripts mean is routing's affair.
"""
