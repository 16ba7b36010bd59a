"""All Lua scripts of Slotkeeper, in the folder `lua` of this package."""

from collections.abc import Mapping
from importlib.resources import files

from redis import Redis

from slotkeeper.redis.keys import Keys
from slotkeeper.redis.script_library import ScriptLibrary
from slotkeeper.redis.scripts import Scripts

LIBRARY = ScriptLibrary(files("routing").joinpath("lua"))


def make_scripts(redis: Redis, keys: Keys, fragments: Mapping[str, str] | None = None) -> Scripts:
    """Return the scripts, to be run on this Redis.  fragments: replace those of the library, as tests do."""
    return Scripts(redis, keys, LIBRARY, fragments)
