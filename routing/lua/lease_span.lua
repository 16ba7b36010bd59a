--[[ lease_span: when the first of a fleet's leases expires.
  Keys: leases
  Returns
    now_ms: int, first_ms: int      first_ms 0: there is none
  Writes nothing
  Called by routing/queue/fleets.py: Fleets.lease_spans
  Clock Redis TIME    Cost O(log leases) ]]
-- @include lib/keys
-- @include lib/now_ms

local first = redis.call("ZRANGE", LEASES, 0, 0, "WITHSCORES")
return { now_ms(), tonumber(first[2] or "0") }
