"""Fixtures: a real Valkey for the session, emptied for each test, and a waiting room on it."""

from tests.lua.room import client, room, valkey

__all__ = ["client", "room", "valkey"]
