"""The command line: one module for each group of commands, and `__main__` with the command `slotkeeper`.

Modules that are slow to import (Flask, SQLAlchemy, rich) are imported inside the commands that need them.
"""
