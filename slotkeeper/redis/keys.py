"""The names of all keys in Redis.  They are born here and nowhere else.

A class is a model and what jobs ask of a server; an account is a tenant and a model; a lane is both, and a priority.
A kind of server serves the same models and declares the same; a group is a model and the kinds that may run its jobs.

All keys of one fleet carry one hash tag, so that every script also works on a Redis Cluster.  Keys that
belong to a member of an index are named by lua/lib/fleet.lua: `<key of the index>:<member>`.
"""

import re

# In this order every script gets them as KEYS; lua/lib/fleet.lua gives them their names there.
FLEET_KEYS = (
    "classes",  # hash  class -> "<kinds>\n<constraints>", see lua/lib/groups.lua; classes:<class> zset lane -> key
    "groups",  # hash  group -> "", of those that have work; groups:<group> zset class -> key of its first lane
    "kinds",  # hash  kind -> "\n<model>\n…\n@<attribute>=<value>\n…", as its servers' entries end
    "lanes",  # hash  account -> jobs that wait; lanes:<lane> zset job@created -> seq;
    # lanes:<account> hash mark -> "" of its lanes, each "<priority>|<digest>"
    "rules",  # hash  "model <m>", "account <t>|<m>", "tenant <t>" -> what is configured, see lua/lib/rules.lua
    "free",  # zset  slot -> since when it is free, ms
    "cooling",  # zset  slot -> until when it is in cooldown, ms
    "slots",  # hash  slot -> job, of the slots that hold a lease; slots:<slot> list of jobs with a lease beside that
    "leases",  # zset  job -> when its lease expires, ms; leases:<job> hash of the lease
    "servers",  # hash  server -> "<state> <slots> <weight>\n<model>\n…\n@<attribute>=<value>\n…"
    "tags",  # tags:<model> zset tenant -> virtual ms at which its next job starts (policy fair)
    "stats",  # stats:server:<s>, stats:model:<m> hash of what runs have shown: breaker, penalty, means
    "held",  # hash  account -> slots that it holds
    "meta",  # hash  epoch, copy, record, offers (a count), catalog (a version), waiting:<model>, failures:<server>,
    # excess ("1": there is meta:excess);
    # meta:unsorted list of accounts whose lanes have to be given new keys after a change of rules;
    # meta:open zset job -> number of its offer, of the leases that nobody has claimed yet;
    # meta:excess hash server -> leases that it has no slot for, so many fewer of its slots are offered;
    # meta:ungrouped list of classes whose servers may be others after a change of the registry
)

# Of how the scripts keep a room.  Processes of another release have another room, which is filled from the record, so
# that none reads or writes what it does not understand; raise it with any change of a key's type or meaning.
QUEUE_FORMAT = 3


class Keys:
    """Builds the keys below one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._fleets: dict[str, list[str]] = {}

    def fleet_keys(self, fleet: str) -> list[str]:
        """The fleet's keys, in the order of FLEET_KEYS."""
        found = self._fleets.get(fleet)
        if found is None:
            found = [f"{self._prefix}:{QUEUE_FORMAT}:{{{fleet}}}:{name}" for name in FLEET_KEYS]
            self._fleets[fleet] = found
        return found

    def fleet_key(self, fleet: str, name: str) -> str:
        """The fleet's key of this name, one of FLEET_KEYS."""
        return self.fleet_keys(fleet)[FLEET_KEYS.index(name)]

    def workers(self) -> str:
        """hash: worker -> "<room> <until>": runs it has room for, and until when that is believed, ms."""
        return f"{self._prefix}:workers"

    def processes(self) -> str:
        """hash: process -> "<said> <until> <facts>": what it said last of itself, and until when that is kept, ms."""
        return f"{self._prefix}:processes"

    def counters(self) -> str:
        """hash: "<name>|<label>" -> how often processes have counted that, see routing/queries/process_counters.py."""
        return f"{self._prefix}:tallies"

    def tasks(self) -> str:
        """hash: task of maintenance -> "<ended> <took>": when it last came to its end, ms, and how long it took."""
        return f"{self._prefix}:tasks"

    def progress(self, job_id: str) -> str:
        """stream: what a run's server says while it is at it, see lua/tell.lua; a channel of the same name."""
        return f"{self._prefix}:said:{job_id}"

    def maintenance_heartbeat(self) -> str:
        """string: there as long as maintenance has swept lately."""
        return f"{self._prefix}:pulse"

    def open_offers(self, fleet: str) -> str:
        """zset: job -> number of its offer, of the fleet's leases that nobody has claimed yet."""
        return f"{self.fleet_key(fleet, 'meta')}:open"

    def known_fleets(self) -> str:
        """set: the fleets that have had a room in this Redis."""
        return f"{self._prefix}:{QUEUE_FORMAT}:rooms"

    def fleet_patterns(self, fleet: str) -> list[str]:
        """Which match all keys of a fleet, and no other's."""
        tag = re.sub(r"([*?\[\]\\])", r"\\\1", f"{{{fleet}}}")
        return [f"{self._prefix}:{QUEUE_FORMAT}:{tag}:*", f"{self._prefix}:{tag}:forecast:*"]

    def rate(self, tenant: str) -> str:
        """string: when the tenant's next submit is due by its rate, ms."""
        return f"{self._prefix}:rate:{tenant}"

    def events(self) -> str:
        """stream: the newest events, each under the id "<its number>-0" as the field `event`; see lua/relay.lua."""
        return f"{self._prefix}:events"

    def secret(self) -> str:
        """string: the fingerprint of the secret that all processes shall have."""
        return f"{self._prefix}:secret"

    def forecast(self, fleet: str, model: str) -> str:
        """hash: promised starts of waiting jobs, and how earlier ones turned out; see lua/learn.lua."""
        return f"{self._prefix}:{{{fleet}}}:forecast:{model}"
