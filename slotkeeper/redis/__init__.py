"""Connect to Redis and run typed Lua scripts, from threads and from an event loop."""
