"""The record's schema, step by step (Alembic).  Run through `migrate`, unless `current` finds nothing to do, or by hand
(`env`) while writing a step:

    alembic -c migrations/alembic.ini -x url=sqlite:///var/record.db revision --autogenerate -m "what it does"

Steps may import slotkeeper.jobs.tables and nothing else of the product.
"""
