--[[ held: all leases of a fleet, and when each expires.
  KEYS[1..14] the fleet's keys, see lib/fleet
  Returns {now_ms, {job, lease, owner, slot, expires_at_ms}…}      Writes nothing
  Clock Redis TIME    Cost O(leases) ]]
-- @include lib/now_ms
-- @include lib/fleet

local found = {}
local leases = redis.call("ZRANGE", LEASES, 0, -1, "WITHSCORES")
for i = 1, #leases, 2 do
  local held = redis.call("HMGET", lease_key(leases[i]), "lease", "owner", "slot")
  if held[1] then found[#found + 1] = { leases[i], held[1], held[2], held[3], leases[i + 1] } end
end
return { now_ms(), found }
