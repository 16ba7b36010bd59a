"""The schema of the database (Alembic).  Run it through `migrate`; to write a step:

    alembic -c migrations/alembic.ini -x url=sqlite:///var/record.db revision --autogenerate -m "what it does"

Steps may import the modules with tables and nothing else of the product.
"""
