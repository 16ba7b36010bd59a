"""The names of all keys in Redis.

A class is a model and the constraints of jobs; an account is a tenant and a model; a lane is both, and a priority.
Servers of one kind serve the same models and declare the same attributes; a group is a model and the kinds of servers
that may run its jobs.

All keys of one fleet carry one hash tag, so that every script also works on a Redis Cluster.  Keys that
belong to a member of an index are named by lua/lib/keys.lua: `<key of the index>:<member>`.
"""

import re

# Every script gets these as KEYS, in this order; lua/lib/keys.lua assigns them to names.
FLEET_KEYS = (
    "classes",  # hash  class -> "<kinds>\n<constraints>", see lua/lib/groups.lua; classes:<class> zset lane -> key
    "groups",  # hash  group -> "", of those that have work; groups:<group> zset class -> key of its first lane;
    # groups:<model> set of the model's groups with work
    "kinds",  # hash  kind -> "\n<model>\n…\n@<attribute>=<value>\n…", as its servers' entries end;
    # kinds:<model> set of the kinds that serve the model
    "lanes",  # hash  account -> number of waiting jobs; lanes:<lane> zset job@created -> seq;
    # lanes:<account> hash mark -> "" of its lanes, each "<priority>|<digest>"
    "rules",  # hash  "model <m>", "account <t>|<m>", "tenant <t>" -> configuration, see lua/lib/rules.lua
    "free",  # zset  slot -> since when it is free, ms; free:<kind> the same of the servers of one kind
    "cooling",  # zset  slot -> end of its cooldown, ms
    "slots",  # hash  slot -> job, of slots with a lease; slots:<slot> list of further jobs with a lease on it
    "leases",  # zset  job -> when its lease expires, ms; leases:<job> hash of the lease
    "servers",  # hash  server -> "<state> <slots> <weight>\n<model>\n…\n@<attribute>=<value>\n…"; state `node`: a
    # node, which is online while meta:present has it
    "tags",  # tags:<model> zset tenant -> virtual ms at which its next job starts (policy fair)
    "stats",  # stats:server:<s>, stats:model:<m> hash of measurements: breaker, penalty, means
    "held",  # hash  account -> number of slots that it holds
    "meta",  # hash  epoch (a number, while the queue is open), number (of the last epoch), filling (its name), copy,
    # record, lost (why it is closed), offers (a count), catalog (a version), waiting:<model>, failures:<server>,
    # excess ("1": there is meta:excess), many_kinds ("1": a model has so many that free:<kind> is not used);
    # meta:unsorted list of accounts whose lanes need new keys after a change of rules;
    # meta:ready zset kind -> number of offers when one last looked at it; each kind with free slots and work is here;
    # meta:open zset job -> number of its offer, of the leases that no worker has claimed yet;
    # meta:excess hash server -> number of leases beyond its slots; so many fewer of its slots are offered;
    # meta:present hash server -> number of its connection, of nodes that take jobs; "#<gateway>" -> "1";
    # meta:ungrouped list of classes whose servers may differ after a change of the catalog
)

# Version of the keys' types and meaning; raise it with any change of them.  Processes of another release have
# another queue, which is filled from the database, so that none reads or writes what it does not understand.
QUEUE_FORMAT = 5


class Keys:
    """Returns key names with one prefix.  The docstrings say what the keys hold."""

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
        """hash: worker -> "<capacity> <until>": free run capacity, and until when the report is valid, ms."""
        return f"{self._prefix}:workers"

    def processes(self) -> str:
        """hash: process -> "<at> <until> <facts>": its last report, and until when it is kept, ms."""
        return f"{self._prefix}:processes"

    def counters(self) -> str:
        """hash: "<name>|<label>" -> count of all processes, see routing/queries/process_counters.py."""
        return f"{self._prefix}:tallies"

    def nodes(self) -> str:
        """hash: "node <id>" -> its connection, "gateway <name>" -> its address; see routing/queue/presence.py."""
        return f"{self._prefix}:nodes"

    def present_nodes(self, fleet: str) -> str:
        """hash: server -> number of its connection, of the fleet's nodes that take jobs."""
        return f"{self.fleet_key(fleet, 'meta')}:present"

    def tasks(self) -> str:
        """hash: maintenance task -> "<ended> <took>": when it last ended, ms, and how long it took."""
        return f"{self._prefix}:tasks"

    def progress(self, job_id: str) -> str:
        """stream: progress of a run, published by the worker; also a channel of the same name."""
        return f"{self._prefix}:said:{job_id}"

    def maintenance_heartbeat(self) -> str:
        """string: exists while maintenance has swept recently."""
        return f"{self._prefix}:pulse"

    def open_offers(self, fleet: str) -> str:
        """zset: job -> number of its offer, of the fleet's leases that no worker has claimed yet."""
        return f"{self.fleet_key(fleet, 'meta')}:open"

    def known_fleets(self) -> str:
        """set: the fleets that have had a queue in this Redis."""
        return f"{self._prefix}:{QUEUE_FORMAT}:rooms"

    def fleet_pattern(self, fleet: str) -> str:
        """Return a pattern that matches all keys of a fleet, and no others."""
        tag = re.sub(r"([*?\[\]\\])", r"\\\1", f"{{{fleet}}}")
        return f"{self._prefix}:{QUEUE_FORMAT}:{tag}:*"

    def rate(self, tenant: str) -> str:
        """hash: name of a rate of the tenant -> when the next submit is due by it, ms."""
        return f"{self._prefix}:rate:{tenant}"

    def watched(self) -> str:
        """zset: job -> when it is canceled unless a client waits for it, ms; see routing/queue/watched_jobs.py."""
        return f"{self._prefix}:watched"

    def events(self) -> str:
        """stream: the newest events, each under the id "<its number>-0" as the field `event`; see lua/relay.lua."""
        return f"{self._prefix}:events"

    def write_check(self) -> str:
        """string: written to find out whether Redis takes writes."""
        return f"{self._prefix}:write_check"

    def secret(self) -> str:
        """string: fingerprint of the secret that all processes must have."""
        return f"{self._prefix}:secret"
