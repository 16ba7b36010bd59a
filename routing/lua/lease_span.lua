--[[ lease_span: when the first and the last of a fleet's leases expire.
  Keys: leases
  Returns
    now_ms: int, first_ms: int, last_ms: int      0 for both if there is none
  Writes nothing
  Called by routing/queue/fleets.py: Fleets.lease_spans
  Clock Redis TIME    Cost O(log leases) ]]
-- @include lib/keys
-- @include lib/now_ms

local first = redis.call("ZRANGE", LEASES, 0, 0, "WITHSCORES")
local last = redis.call("ZRANGE", LEASES, -1, -1, "WITHSCORES")
return { now_ms(), tonumber(first[2] or "0"), tonumber(last[2] or "0") }
