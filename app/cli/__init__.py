"""The command line: one file for each subject, `__main__` puts them together.

What is slow to import (Flask, SQLAlchemy, rich) is imported inside the commands that need it.
"""
