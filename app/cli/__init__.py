"""The command line: one file for each subject, and `__main__` with the command `slotkeeper`.

Modules that are slow to import (Flask, SQLAlchemy, rich) are imported inside the commands that need them.
"""
