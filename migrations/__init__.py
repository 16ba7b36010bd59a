"""The record's schema, step by step (Alembic).  Run through migrations.migrate, or by hand while writing a step:

    alembic -c migrations/alembic.ini -x url=sqlite:///var/record.db revision --autogenerate -m "what it does"

May import jobs.models and nothing else of the product.
"""
