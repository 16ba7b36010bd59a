"""Fixtures: the room of tests/lua."""

from tests.lua.room import client, valkey

__all__ = ["client", "valkey"]
