"""Interfaces for people and programs: the REST API, the page, the command line, and everything on one machine."""
