"""registry: what operators have set up.

    catalog      models, their configuration, servers       config       what can be configured for a model
    cache        the catalog as processes use it: a copy    policies     whose turn it is, and what is said of it
    descriptions how servers are spoken to                  secrets      what descriptions name, sealed
    removal      models and servers removed                 defaults     of kinds of models, and of all
    tenants      who may come in                            rotations    webhook secrets
    values       what has been registered, as values        tables       its tables
    steady_time  the time that processes agree on, in a record on SQLite
    visits       to the page, ended by a log-out

All of it is part of the record; routing brings what it needs of it to Redis.
"""
